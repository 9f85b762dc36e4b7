"""Data on disk and in batches: complete shards only, exact masks, a position that can be kept."""

import numpy as np
import pytest

from train.data import (
    TokenSequence,
    fit_to_length,
    join,
    sequential_batches,
    shuffled_batches,
    supervised_answer,
)
from train.shards import read_dataset, shard_path, write_manifest, write_shard

MANIFEST = {"target": "t", "template_sha256": "s"}


def documents(count, length=20):
    return [supervised_answer([i, i, i], range(100, 100 + length)) for i in range(count)]


@pytest.fixture
def folder(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    write_shard(tmp_path, 0, documents(10)[:4])
    write_shard(tmp_path, 1, documents(10)[4:])
    return tmp_path


def test_exactly_the_answer_is_supervised():
    document = supervised_answer([5, 6, 7], [8, 9, 2])
    assert document.tokens.tolist() == [5, 6, 7, 8, 9, 2]
    assert document.loss_mask.tolist() == [False] * 3 + [True] * 3


def test_documents_come_back_in_order(folder):
    dataset = read_dataset(folder)
    assert len(dataset) == 10
    for index, document in enumerate(documents(10)):
        np.testing.assert_array_equal(dataset[index].tokens, document.tokens)
        np.testing.assert_array_equal(dataset[index].loss_mask, document.loss_mask)
    assert dataset.fingerprint == {"documents": 10, "tokens": 230, "supervised": 200}


def test_a_shard_cut_short_is_not_read(folder):
    (folder / "shard-00002.partial").write_bytes(b"half")
    assert len(read_dataset(folder)) == 10


def test_only_a_resumed_job_continues_a_folder_and_only_its_own(folder, tmp_path_factory):
    write_manifest(folder, MANIFEST | {"versions": {"jax": "other"}}, resume=True)
    with pytest.raises(FileExistsError, match="--resume"):
        write_manifest(folder, MANIFEST)
    with pytest.raises(ValueError, match=r"target = 't', this job has 'u'"):
        write_manifest(folder, MANIFEST | {"target": "u"}, resume=True)
    with pytest.raises(FileNotFoundError, match="nothing to resume"):
        write_manifest(tmp_path_factory.mktemp("new"), MANIFEST, resume=True)


def test_a_damaged_shard_is_named(folder):
    path = shard_path(folder, 1)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"shard-00001\.array_record is no readable shard"):
        read_dataset(folder)


def test_shards_of_older_folders_are_read(folder):
    extra = documents(10)[:2]
    np.savez(
        folder / "shard-00002.npz",
        tokens=np.concatenate([one.tokens for one in extra]),
        loss_mask=np.concatenate([one.loss_mask for one in extra]),
        offsets=np.array([0, 23, 46]),
    )
    dataset = read_dataset(folder)
    assert len(dataset) == 12
    np.testing.assert_array_equal(dataset[11].tokens, extra[1].tokens)
    np.testing.assert_array_equal(dataset[11].loss_mask, extra[1].loss_mask)


def test_an_empty_shard_is_complete_and_holds_nothing(folder):
    write_shard(folder, 2, [])
    assert len(read_dataset(folder)) == 10


def test_a_folder_without_data_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"manifest.json"):
        read_dataset(tmp_path)
    write_manifest(tmp_path, MANIFEST)
    with pytest.raises(FileNotFoundError, match="no complete shard"):
        read_dataset(tmp_path)


def test_joined_data_keeps_its_documents_and_refuses_another_template(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    write_manifest(other, MANIFEST | {"template_sha256": "x"})
    write_shard(other, 0, documents(2))
    dataset = read_dataset(folder)
    both = join([dataset, dataset])
    np.testing.assert_array_equal(both[13].tokens, dataset[3].tokens)
    with pytest.raises(ValueError, match="template_sha256"):
        join([dataset, read_dataset(other)])


def test_documents_are_cut_and_short_ones_dropped(folder):
    write_shard(folder, 2, [supervised_answer(range(10), range(5))])
    fitted = fit_to_length(read_dataset(folder), 16, 13)
    assert len(fitted) == 10
    assert all(len(fitted[i].tokens) == 16 for i in range(10))
    with pytest.raises(ValueError, match="none of 11 documents has 14 supervised"):
        fit_to_length(read_dataset(folder), 16, 14)


def first_tokens(batch):
    return batch["tokens"][:, 0].tolist()


def stream(dataset, seed):
    return shuffled_batches(dataset, batch_size=4, length=24, seed=seed)


def test_an_epoch_visits_documents_once_and_epochs_differ(folder):
    batches = stream(read_dataset(folder), 1)
    epochs = [[first_tokens(next(batches)) for _ in range(2)] for _ in range(3)]
    assert all(len({token for batch in epoch for token in batch}) == 8 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_seed_fixes_the_order_and_the_state_its_position(folder):
    dataset = read_dataset(folder)
    one, same, other = stream(dataset, 1), stream(dataset, 1), stream(dataset, 2)
    begun = [[first_tokens(next(batches)) for _ in range(3)] for batches in (one, same, other)]
    assert begun[0] == begun[1] != begun[2]
    position = one.get_state()
    rest = [first_tokens(next(one)) for _ in range(5)]
    fresh = stream(dataset, 1)
    fresh.set_state(position)
    assert [first_tokens(next(fresh)) for _ in range(5)] == rest


def test_padding_is_unsupervised(folder):
    batch = next(stream(read_dataset(folder), 0))
    assert batch["tokens"].shape == (4, 24)
    assert not batch["loss_mask"][:, 23:].any()
    assert batch["loss_mask"][:, 3:23].all()


def test_sequential_batches_visit_everything_in_order_and_fill_the_last(folder):
    batches = list(sequential_batches(read_dataset(folder), batch_size=4, length=24))
    assert [batch["tokens"].shape for batch in batches] == [(4, 24)] * 3
    assert [token for batch in batches for token in first_tokens(batch)][:10] == list(range(10))
    assert not batches[-1]["loss_mask"][2:].any()


def test_too_few_documents_for_a_batch_is_an_error(folder):
    with pytest.raises(ValueError, match="10 documents do not fill one batch of 11"):
        shuffled_batches(read_dataset(folder), batch_size=11, length=24, seed=0)


def test_a_mask_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="loss mask of shape"):
        TokenSequence(np.zeros(3), np.zeros(2))
