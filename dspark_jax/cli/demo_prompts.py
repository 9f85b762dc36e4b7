"""The prompts of `dspark demo`, by kind of text."""

PROMPTS = {
    "arithmetic": (
        "A baker fills 14 trays with 12 rolls each and sells 95 rolls before noon. How many rolls "
        "are left? Explain each step.",
        "A train leaves at 9:40 and arrives at 13:05 after two stops of 10 minutes each. How long "
        "was it moving?",
    ),
    "code": (
        "Write a Python function that returns the second largest number of a list, and explain it.",
        "Write a Python function that counts how often each word occurs in a text file.",
    ),
    "explanation": (
        "Why do we see the lightning before we hear the thunder?",
        "Explain to a ten-year-old how a lock on a canal lifts a boat.",
    ),
    "writing": (
        "Write a short letter that invites a neighbour to a garden party on Saturday.",
        "List five things to check before a long bicycle tour, with a reason for each.",
    ),
}
