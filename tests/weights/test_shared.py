"""Weights in shared memory: who reads them has what is published, as long as it needs it.

test_transports.py has readers in other processes."""

import os
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tandem.model.schedule import threads_of
from tandem.weights.hashing import combine, tensor_digests
from tandem.weights.shared import CHUNK, Layout, SharedWeights, read_tensors, write_tensors


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator).bfloat16(),
        "scalar": torch.full((), float("nan")),
        "c": torch.randn(4, 6, generator=generator).t(),  # not contiguous
    }


def digest_of(tensors):
    return combine(tensor_digests(tensors))


def read(shared, version):
    descriptor = shared.descriptor(version)
    try:
        return read_tensors(shared.layout, descriptor)
    finally:
        os.close(descriptor)


@pytest.fixture
def shared():
    with closing(SharedWeights(tensors())) as shared:
        yield shared


def test_published_weights_are_copies_in_every_type_and_shape(shared):
    mine = tensors()
    digest = shared.publish(4, mine)
    assert digest == shared.hash_of(4) == digest_of(mine) == digest_of(read(shared, 4))
    assert {name: (t.dtype, t.shape) for name, t in read(shared, 4).items()} == {
        name: (t.dtype, t.shape) for name, t in mine.items()
    }
    for weights in (mine, read(shared, 4)):
        weights["b"].zero_()
        assert digest_of(read(shared, 4)) == digest != digest_of(weights)
    with pytest.raises(ValueError, match="published as version 4 already"):
        shared.publish(4, mine)
    assert shared.hash_of(4) == digest == digest_of(read(shared, 4))


def test_reader_keeps_its_version_until_its_memory_is_written_again(shared):
    first = shared.publish(0, tensors(0))
    held = read(shared, 0)
    second = shared.publish(1, tensors(1))
    shared.release(below=1)
    assert digest_of(held) == first != second == digest_of(read(shared, 1))
    third = shared.publish(2, tensors(2))
    assert digest_of(held) == third == digest_of(read(shared, 2))


def memory_files():
    return {n for n in os.listdir("/dev/fd") if "memfd" in os.path.realpath(f"/dev/fd/{n}")}


def test_released_versions_are_gone_and_leave_no_descriptor():
    before = memory_files()
    shared = SharedWeights(tensors())
    for version in range(6):
        shared.publish(version, tensors(version))
        shared.release(below=version - 1)
    files = [os.path.realpath(f"/dev/fd/{n}") for n in memory_files() - before]
    assert {Path(file).name for file in files} <= {"memfd:tandem weights (deleted)"}  # no name
    assert shared.versions == [4, 5] and (files or sys.platform != "linux")
    for ask in (shared.descriptor, shared.hash_of):
        with pytest.raises(LookupError, match=r"version 3 are not published; there are \[4, 5\]"):
            ask(3)
    shared.close()
    assert shared.versions == [] and memory_files() <= before


def test_tensors_of_another_layout_are_refused(shared):
    for wrong in (
        {**tensors(), "b": torch.zeros(7)},
        {"b": tensors()["b"]},
        {**tensors(), "b": tensors()["b"][:3]},
    ):
        with pytest.raises(ValueError, match="not those of the layout"):
            shared.publish(0, wrong)
    assert shared.versions == []


def test_threads_write_the_bytes_and_digests_of_one():
    weights = tensors()
    weights["long"] = torch.randn(3 * CHUNK // 4 + 1)  # some chunks, and 4 bytes
    layout, written = Layout.of(weights), []
    for number in (1, 3):
        memory = torch.zeros(layout.size, dtype=torch.uint8)
        with threads_of(number):
            digests = write_tensors(layout, weights, memory)
        assert list(digests.items()) == list(tensor_digests(weights).items())
        written.append(memory.numpy().tobytes())
    assert written[0] == written[1]
    assert tensor_digests(dict(layout.views(memory))) == digests


def test_threads_may_publish_release_and_read_at_once(shared):
    wrong = []
    hashes = [digest_of(tensors(version)) for version in range(30)]
    shared.publish(0, tensors(0))
    published = threading.Semaphore(0)

    def train():
        for version in range(1, 30):
            shared.publish(version, tensors(version))
            shared.release(below=version - 3)
            published.release()

    thread = threading.Thread(target=train)
    thread.start()
    for _ in range(1, 30):
        published.acquire()
        version = shared.versions[-1]
        is_wrong = digest_of(read(shared, version)) != hashes[version]
        wrong += [version] * (is_wrong and version in shared.versions)
    thread.join()
    assert wrong == [] and shared.versions == [26, 27, 28, 29]
