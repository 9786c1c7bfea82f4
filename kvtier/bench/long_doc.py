"""Documents that are read once and then asked about, by engines whose own pool holds few of them.

What the engine's pool lost, each arm has to find in the tier that it is named after.
"""

from __future__ import annotations

from typing import Final

from kvtier.bench.messages import Build
from kvtier.bench.place import Place
from kvtier.bench.processes import Bench, Outcome, Tell
from kvtier.bench.settings import Settings
from kvtier.bench.workloads import LongDoc, question_order

_BLOCK: Final = 32  # tokens of the largest block that an engine here has
_CACHED: Final = ("dram", "lmdb", "s3")


def long_doc(settings: Settings, shape: LongDoc, place: Place, tell: Tell) -> Outcome:
    """Let each arm read all documents, then answer the questions, in turn with the others.

    The samples of an arm are those of reading, one a document, and then those of the questions.
    """
    tokens = shape.document_length + shape.suffix_len + shape.output_len
    chunk = settings.chunk_tokens
    reusable = shape.document_length // chunk * chunk
    with Bench(settings, place, tell) as bench:
        build = Build(shape, settings.seed, chunk)
        with bench.prompts(build, tokens) as (_, loaded, built):
            first, *groups = built.groups
            whole = tokens * len(groups)
            bench.check_room(loaded, at_once=whole, in_all=whole)
        bench.start()
        bench.open(settings.arms, (tokens + _BLOCK) * shape.hbm_documents, spare=False)
        order = question_order(shape, settings.seed)
        bench.steps((1 + shape.num_documents + len(order)) * len(settings.arms))
        for arm in settings.arms:
            bench.step(f"warming up, {arm}")
            bench.serve(arm, first.prefix[:chunk] + first.warm, 1)
        for turn, group in enumerate(groups[: shape.num_documents]):
            for arm in bench.rotated(turn):
                bench.step(f"reading document {turn + 1} of {shape.num_documents}, {arm}")
                bench.timed(arm, group.prefix + group.warm, shape.output_len, 0)
        for turn, (document, question) in enumerate(order):
            prompt = groups[document].prefix + groups[document].timed[question]
            was_read = document < shape.num_documents
            for arm in bench.rotated(turn):
                bench.step(f"question {turn + 1} of {len(order)}, {arm}")
                bench.empty(arm, keeps_hbm=True)
                expected = reusable if was_read and arm in _CACHED else 0
                bench.timed(arm, prompt, shape.output_len, expected)
        bench.clean()
    return Outcome(loaded, bench.samples)
