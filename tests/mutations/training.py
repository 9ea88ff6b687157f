"""What a training script adds."""

from __future__ import annotations

from .model import mutation

TRAINING = (
    mutation(
        "a block a step too old",
        "lossycoll/train/common/staleness.py",
        "mask: Mask = self.values >= self._max_age",
        "mask: Mask = self.values > self._max_age",
        "tests/train/common/test_staleness.py::test_ages_count_steps_since_a_block_came",
    ),
    mutation(
        "a late rank begins another micro-batch",
        "lossycoll/train/dropcompute/loop.py",
        "late = self._watch.elapsed > self._threshold",
        "late = self._watch.elapsed > 2 * self._threshold",
        "tests/train/dropcompute/test_loop.py::test_no_micro_batch_begins_after_the_threshold",
    ),
    mutation(
        "lost rows are forgotten",
        "lossycoll/train/compress/error_memory.py",
        'self.tensors["error"].index_add_(0, delivered.index, delivered.values, alpha=-1)',
        'self.tensors["error"].index_fill_(0, delivered.index, 0.0)',
        "tests/train/compress/test_error_memory.py::test_nothing_is_forgotten",
    ),
    mutation(
        "dropped micro-batches count",
        "lossycoll/train/dropcompute/runner.py",
        "return self._settings.micro_batches * ranks / completed",
        "return 1.0",
        "tests/train/dropcompute/test_controller.py::test_the_mean_is_over_what_was_completed",
    ),
)
