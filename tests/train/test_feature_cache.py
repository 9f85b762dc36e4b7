"""The feature cache: DeepSpec's layout byte for byte, whole documents, and honest refusals."""

import dataclasses
import json
import struct

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from train import cache_features as module
from train.cache_features import cache_features, check_features
from train.config import TargetSection
from train.data import supervised_answer
from train.data_config import AnswersSection, DataConfig, FeaturesSection, SelfPromptingSection
from train.feature_cache import CachedSequence, CacheWriter, FeatureCache, cache_bytes
from train.shards import write_manifest, write_shard
from train.stopping import Stop, Stopped

BF16 = ml_dtypes.bfloat16
FACTS = {"hidden_size": 4, "target_layer_ids": [0, 2], "target_model_name_or_path": "t"}


def document(length, seed=0):
    generator = np.random.default_rng(seed)
    return CachedSequence(
        tokens=generator.integers(0, 99, length).astype(np.int32),
        loss_mask=np.arange(length) > 1,
        taps=generator.normal(size=(length, 8)).astype(BF16),
        last_hidden=generator.normal(size=(length, 4)).astype(BF16),
    )


def write(folder, lengths, finish=True, **options):
    writer = CacheWriter(folder, FACTS, **{"shard_bytes": 10**9, **options})
    for index in range(writer.documents, len(lengths)):
        writer.add(document(lengths[index], index))
    if finish:
        writer.finish()
    writer.close()


def same(one, other):
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name))
        for field in dataclasses.fields(CachedSequence)
    )


def test_a_cache_written_by_hand_after_the_published_layout_is_read(tmp_path):
    """What DeepSpec's own writer leaves: two samples, one shard, no field beyond its own."""
    shard, index = b"", b""
    for sample, length in enumerate((3, 5)):
        one = document(length, sample)
        parts = [
            one.tokens.astype("<i4").tobytes(),
            bytes([1] * length),
            one.loss_mask.astype(np.uint8).tobytes(),
            one.taps.view(np.uint16).tobytes(),
            one.last_hidden.view(np.uint16).tobytes(),
        ]
        offsets = np.cumsum([len(shard), *map(len, parts[:-1])]).tolist()
        index += struct.pack("<QIIQQQQQ", sample, 0, length, *offsets)
        shard += b"".join(parts)
    (tmp_path / "shard-00000.bin").write_bytes(shard)
    (tmp_path / "samples.idx").write_bytes(index)
    manifest = {
        "version": 2,
        "num_samples": 2,
        "num_shards": 1,
        "target_layer_ids": [0, 2],
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": 56,
        "hidden_size": 4,
        "shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}],
        "target_model_name_or_path": "Qwen/Qwen3-4B",
        "chat_template": "qwen",
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    cache = FeatureCache(tmp_path)
    assert [same(cache[i], document(length, i)) for i, length in enumerate((3, 5))] == [True, True]
    assert cache.fingerprint == {"documents": 2, "tokens": 8, "supervised": 4}
    # our writer leaves the same bytes
    write(tmp_path / "ours", (3, 5))
    assert (tmp_path / "ours" / "shard-00000.bin").read_bytes() == shard
    assert (tmp_path / "ours" / "samples.idx").read_bytes() == index
    ours = json.loads((tmp_path / "ours" / "manifest.json").read_text())
    assert {key: ours[key] for key in manifest if key in FACTS or key == "shards"} == {
        **FACTS,
        "shards": manifest["shards"],
    }
    assert set(manifest) - set(ours) == {"chat_template"}


def test_a_full_shard_is_followed_by_another_and_sizes_are_as_foretold(tmp_path):
    lengths = [5, 6, 7, 30]
    write(tmp_path, lengths, shard_bytes=12 * 30)
    assert len(list(tmp_path.glob("shard-*.bin"))) == 3
    cache = FeatureCache(tmp_path)
    assert all(same(cache[i], document(length, i)) for i, length in enumerate(lengths))
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("s*.*"))
    assert on_disk == cache_bytes(4, sum(lengths), 4, 2)


@pytest.mark.parametrize("lost", [0, 1, 30, 57, 200, 10**6])
def test_a_cache_broken_off_anywhere_continues_to_the_same_bytes(tmp_path, lost):
    lengths = [5, 6, 7, 30]
    write(tmp_path / "whole", lengths, shard_bytes=12 * 30)
    broken = tmp_path / "broken"
    write(broken, lengths[:3], finish=False, shard_bytes=12 * 30)
    for name in ("samples.idx", "shard-00001.bin"):
        content = (broken / name).read_bytes()
        (broken / name).write_bytes(content[: max(0, len(content) - lost)])
    with pytest.raises(FileNotFoundError, match="no feature cache"):
        FeatureCache(broken)
    write(broken, lengths, shard_bytes=12 * 30, resume=True)
    for path in (tmp_path / "whole").iterdir():
        assert (broken / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_document_without_its_index_entry_is_written_again_and_only_once(tmp_path):
    write(tmp_path, [5, 6], finish=False)
    with (tmp_path / "shard-00000.bin").open("ab") as shard:
        shard.write(b"half a document")
    write(tmp_path, [5, 6, 7], resume=True)
    cache = FeatureCache(tmp_path)
    assert len(cache) == 3
    assert same(cache[2], document(7, 2))


def test_a_folder_of_another_cache_is_not_continued(tmp_path):
    write(tmp_path, [5], finish=False)
    with pytest.raises(FileExistsError, match="--resume"):
        write(tmp_path, [5])
    with pytest.raises(ValueError, match=r"hidden_size = 4, this job has 5"):
        CacheWriter(tmp_path, FACTS | {"hidden_size": 5}, shard_bytes=99, resume=True)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", 1, r"version is 1; wanted 2"),
        ("hidden_dtype", "float8_e4m3fn", r"hidden_dtype is 'float8_e4m3fn'; wanted 'bfloat16'"),
        ("index_record_size", 48, "index_record_size is 48; wanted 56"),
        ("num_samples", 3, r"samples\.idx has 112 bytes; 3 documents want 168"),
        ("shards", [], "names shard 0; the manifest lists 0"),
        ("hidden_size", None, "lacks hidden_size"),
    ],
)
def test_a_cache_that_is_something_else_is_refused_by_field(tmp_path, field, value, message):
    write(tmp_path, [5, 6])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest[field] = value
    if value is None:
        del manifest[field]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=message):
        FeatureCache(tmp_path)


def test_a_shard_that_is_too_short_is_named(tmp_path):
    write(tmp_path, [5, 6])
    shard = tmp_path / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"shard-00000\.bin has 329 bytes; its documents end at"):
        FeatureCache(tmp_path)


@pytest.fixture
def job(tmp_path):
    generator = np.random.default_rng(0)
    documents = [
        supervised_answer(generator.integers(17, 150, 4), generator.integers(17, 150, size))
        for size in generator.integers(5, 20, 7)
    ]
    manifest = {"target": "t", "template_sha256": "", "temperature": 1.0}
    write_manifest(tmp_path / "data", manifest)
    write_shard(tmp_path / "data", 0, documents)
    return DataConfig(
        target=TargetSection("tiny"),
        answers=AnswersSection(str(tmp_path / "data"), max_new_tokens=20, max_context=32),
        self_prompting=SelfPromptingSection(count=7),
        features=FeaturesSection(str(tmp_path / "cache"), target_layer_ids=(-1, 1), batch=3),
    )


def test_cached_features_are_the_ones_of_training_in_bf16(job, tiny_target):
    cache = FeatureCache(cache_features(job, tiny_target))
    assert (len(cache), cache.taps, cache.hidden_size) == (7, (-1, 1), 48)
    one = cache[4]
    tokens = np.zeros((3, 32), np.int32)
    tokens[1, : len(one.tokens)] = one.tokens
    taps, last = module.features(
        tiny_target.config, tiny_target.weights, jnp.asarray(tokens), (-1, 1)
    )
    rows = slice(0, len(one.tokens))
    np.testing.assert_array_equal(one.taps, np.asarray(taps)[1, rows].astype(BF16))
    np.testing.assert_array_equal(one.last_hidden, np.asarray(last)[1, rows].astype(BF16))
    on_disk = sum(path.stat().st_size for path in cache.folder.glob("s*.*"))
    assert on_disk == cache_bytes(7, cache.fingerprint["tokens"], 48, 2)


def test_a_stopped_cache_continues_to_the_same_bytes(job, tiny_target, tmp_path, monkeypatch):
    whole = cache_features(job, tiny_target)
    other = dataclasses.replace(job.features, output=str(tmp_path / "other"))
    broken = dataclasses.replace(job, features=other)
    stop, add = Stop(), CacheWriter.add

    def signalled(writer, one):
        add(writer, one)
        stop.pending |= writer.documents == 4

    with monkeypatch.context() as patch:
        patch.setattr(CacheWriter, "add", signalled)
        with pytest.raises(Stopped):
            cache_features(broken, tiny_target, stop=stop)
    continued = cache_features(broken, tiny_target, resume=True)
    for path in whole.iterdir():
        assert (continued / path.name).read_bytes() == path.read_bytes(), path.name
    assert len(FeatureCache(continued)) == 7


@pytest.mark.parametrize(("layers", "message"), [((0, 5), "holds 5"), ((-2,), "holds -2")])
def test_layers_that_cannot_be_tapped_are_refused_before_anything_runs(
    job, tiny_target, layers, message
):
    features = dataclasses.replace(job.features, target_layer_ids=layers)
    wrong = dataclasses.replace(job, features=features)
    with pytest.raises(ValueError, match=message):
        check_features(wrong, tiny_target, False)


def test_the_last_layer_is_no_tap(job, tiny_target):
    last = tiny_target.config.num_hidden_layers - 1
    features = dataclasses.replace(job.features, target_layer_ids=(0, last))
    with pytest.raises(ValueError, match=f"holds {last}"):
        check_features(dataclasses.replace(job, features=features), tiny_target, False)


def test_a_folder_in_use_is_refused_before_anything_runs(job, tiny_target, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "something").touch()
    with pytest.raises(FileExistsError, match="not empty"):
        check_features(job, tiny_target, False)
