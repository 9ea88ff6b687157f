"""What a training script adds."""

from __future__ import annotations

from .model import mutation

TRAINING = (
    mutation(
        "a pass that no step takes is remembered",
        "lossycoll/train/sharded/gradient_reducer.py",
        "self._state.discard(self._sent)",
        "self._state.commit(self._sent)",
        "tests/train/sharded/test_compression.py"
        "::test_gradients_that_no_step_takes_are_not_remembered",
    ),
    mutation(
        "survivors add up what each of them has",
        "lossycoll/train/common/collectives.py",
        "if after == before:",
        "if after:",
        "tests/train/dropcompute/test_loss.py"
        "::test_survivors_of_a_loss_at_the_end_of_a_loop_scale_and_end_alike",
    ),
    mutation(
        "a block a step too old",
        "lossycoll/train/sharded/parameter_sync.py",
        "mask: Mask = self.values >= self._max_age",
        "mask: Mask = self.values > self._max_age",
        "tests/train/sharded/test_staleness.py::test_ages_count_steps_since_a_block_came",
    ),
    mutation(
        "blocks that no owner has are resent",
        "lossycoll/train/sharded/parameter_sync.py",
        "mask &= self.of_others",
        "mask &= True",
        "tests/train/sharded/test_few_owners.py"
        "::test_lost_blocks_of_few_owners_are_counted_once[0]",
    ),
    mutation(
        "blocks are resent for their age where nothing shall be",
        "lossycoll/train/sharded/optimizer.py",
        "bounded = max_age != AUTO or not self._collectives.resends_nothing",
        "bounded = True",
        "tests/train/sharded/test_few_owners.py"
        "::test_lost_blocks_of_few_owners_are_counted_once[auto]",
    ),
    mutation(
        "the same ranks own all short buckets",
        "lossycoll/train/common/layout.py",
        "first = (first + count) % world",
        "first = 0",
        "tests/train/common/test_layout.py"
        "::test_few_ranks_own_a_short_bucket_and_the_next_ones_the_next",
    ),
    mutation(
        "a block has come when its first packet has",
        "lossycoll/runtime/engine/packet_masks.py",
        "before[last + 1] > before[first]",
        "before[first + 1] > before[first]",
        "tests/train/sharded/test_few_owners.py::test_pieces_overlap_as_their_elements_do",
    ),
    mutation(
        "what is reported lost is taken for full packets",
        "lossycoll/train/common/collectives.py",
        "reported.block_bytes // source.element_size()",
        "group.block_bytes // source.element_size()",
        "tests/train/sharded/test_few_owners.py"
        "::test_all_that_is_reported_lost_comes_later_also_in_smaller_packets",
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
        'self._add_rows("error", delivered, -1.0)',
        'self.tensors["error"].index_fill_(0, delivered.index, 0.0)',
        "tests/train/compress/test_error_memory.py::test_nothing_is_forgotten",
    ),
    mutation(
        "a refused pass with compression counts as one that is to be stepped",
        "lossycoll/train/sharded/gradient_reducer.py",
        "self._compression is not None and self._status.bad:",
        "self._compression is not None and not self._status:",
        "tests/train/sharded/test_compression.py"
        "::test_the_next_pass_may_begin_when_a_step_was_refused",
    ),
    mutation(
        "what was changed between two steps is overwritten",
        "lossycoll/train/drift/bound.py",
        "wanted = finite & same",
        "wanted = finite",
        "tests/train/drift/test_bound.py::"
        "test_a_slice_is_taken_before_the_next_update_but_for_what_was_changed_meanwhile",
    ),
    mutation(
        "the default of a method goes before what the group was given",
        "lossycoll/train/common/delivery.py",
        "(self.exact or self.asked or not given)",
        "(self.exact or not given or True)",
        "tests/train/common/test_recovery.py::test_a_call_is_made_with",
    ),
    mutation(
        "parameters are stepped while others may still ask for them",
        "lossycoll/train/sharded/parameter_sync.py",
        "self.close()\n        failure, self._failure",
        "self.finish_all()\n        failure, self._failure",
        "tests/train/sharded/test_parameter_sync.py::test_a_bucket_is_waited_for_alone_and_once",
    ),
    mutation(
        "a module doesn't wait for its own parameters",
        "lossycoll/train/sharded/module_waits.py",
        "yield from module.parameters(recurse=False)",
        "yield from ()",
        "tests/train/sharded/test_module_waits.py::test_a_module_waits_for_its_own_parameters",
    ),
    mutation(
        "what an earlier forward pass read may change without a word",
        "lossycoll/train/sharded/parameter_sync.py",
        "            bucket.differences.apply()\n        bucket.touch()\n",
        "            bucket.differences.apply()\n",
        "tests/train/sharded/test_parameter_sync.py::test_a_bucket_is_waited_for_alone_and_once",
    ),
    mutation(
        "dropped micro-batches count",
        "lossycoll/train/dropcompute/controller.py",
        "return self._settings.micro_batches * ranks / completed",
        "return 1.0",
        "tests/train/dropcompute/test_controller.py::test_the_mean_is_over_what_was_completed",
    ),
    mutation(
        "what is rounded off of a gradient is forgotten",
        "lossycoll/train/common/delivery.py",
        "torch.sub(row, missed.masked_fill_(gone, 0), out=missed)",
        "missed.copy_(row).masked_fill_(~gone, 0)",
        "tests/train/common/test_wire.py::test_the_mean_is_that_of_what_counts_as_delivered",
    ),
    mutation(
        "what is rounded off of a mean is nobody's",
        "lossycoll/train/compress/step.py",
        "part.add_(own - exact, alpha=collectives.world)",
        "part.add_(own - exact, alpha=0)",
        "tests/train/common/test_wire.py::test_the_mean_is_that_of_what_counts_as_delivered",
    ),
    mutation(
        "optimizers step on rounded weights",
        "lossycoll/train/sharded/parameter_sync.py",
        "torch.sub(self._own, held, out=self._owed)",
        "self._owed.zero_()",
        "tests/train/sharded/test_wire.py::test_small_steps_are_not_rounded_away",
    ),
    mutation(
        "an anchor that has moved to another place stays there",
        "lossycoll/train/sharded/parameter_sync.py",
        "self._written = self._written or sent.moves",
        "self._written = self._written or False",
        "tests/train/sharded/test_parameter_sync.py::"
        "test_where_an_anchor_was_not_moved_alike_parameters_go_as_they_are",
    ),
    mutation(
        "loaded weights travel as differences",
        "lossycoll/train/sharded/optimizer.py",
        "self._parameter_sync.begin(whole=bool(status.written))",
        "self._parameter_sync.begin()",
        "tests/train/sharded/test_wire.py::test_weights_that_are_loaded_are_not_rounded",
    ),
)
