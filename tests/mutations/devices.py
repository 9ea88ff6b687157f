"""Mistakes on the way of tensors by host memory, each with a test that sees it."""

from __future__ import annotations

from .model import mutation

GATES = "tests/runtime/engine/test_gates.py"
BOUNCE = "tests/devices/test_bounce.py"
FAKE = "tests/gpu/test_fake_device.py"

DEVICES = (
    mutation(
        "an operation that starts before its input is there",
        "native/gate.c",
        "return !gate || __atomic_load_n(&gate->ready, __ATOMIC_SEQ_CST);",
        "return !gate || gate;",
        f"{GATES}::test_an_operation_waits_for_its_gate",
    ),
    mutation(
        "a device that is never told of the end",
        "native/gate.c",
        "if (op->call.gate)\n        __atomic_store_n",
        "if (op->call.gate && op->finished)\n        __atomic_store_n",
        f"{GATES}::test_an_operation_waits_for_its_gate",
    ),
    mutation(
        "half a result of what has failed",
        "native/operations.c",
        "if (!op->shown)\n            lc_gate_fail(op);",
        "if (op->shown)\n            lc_gate_fail(op);",
        f"{GATES}::test_the_output_of_what_fails_is_no_number",
    ),
    mutation(
        "memory that is given back while a copy is under way",
        "lossycoll/devices/bounce.py",
        "        return over and all(event.is_done() for event in places)\n",
        "        return over\n",
        f"{BOUNCE}::test_nothing_is_over_before_its_copies_are",
    ),
    mutation(
        "a copy back that doesn't wait for the operation",
        "lossycoll/devices/bounce.py",
        "                stream.wait_for_word(gates.done_word(piece.gate))\n",
        "",
        f"{FAKE}::test_what_the_checks_want_holds_on_a_fake_device",
    ),
    mutation(
        "pieces that come back when the first of them is done",
        "lossycoll/devices/bounce.py",
        "                stream.wait_for_word(gates.done_word(piece.gate))\n",
        "                stream.wait_for_word(gates.done_word(self.pieces[0].gate))\n",
        f"{BOUNCE}::test_pieces_come_back_one_by_one",
    ),
    mutation(
        "a call of which the last piece alone counts",
        "lossycoll/backend/on_device.py",
        "each = works if len(bounce.pieces) > 1 else [last]",
        "each = [last]",
        f"{FAKE}::test_what_the_checks_want_holds_on_a_fake_device",
    ),
    mutation(
        "sizes in few bits that nobody compares",
        "lossycoll/backend/device_wire.py",
        "of {tensor.dtype}[{tensor.numel()}]",
        "of {tensor.dtype}",
        f"{FAKE}::test_what_the_checks_want_holds_on_a_fake_device",
    ),
    mutation(
        "a split group that forgets the other backend",
        "lossycoll/backend/process_group.py",
        "configured=self._devices.configured(),",
        'configured="",',
        "tests/backend/test_devices.py::test_tensors_of_another_backends_device_go_there",
    ),
    mutation(
        "a copy that may keep what was there and never got it",
        "lossycoll/devices/bounce.py",
        "            if keeps:\n",
        "            if keeps and not reads:\n",
        f"{BOUNCE}::test_what_may_stay_as_it_is_is_copied_too",
    ),
    mutation(
        "groups that share a lane",
        "lossycoll/devices/registry.py",
        "                return self._free.pop()\n",
        "                return self._free[-1]\n",
        f"{BOUNCE}::test_lanes_are_used_again_by_other_groups",
    ),
    mutation(
        "a call with more pieces than its lane takes",
        "lossycoll/backend/on_device.py",
        "least * max(1, -(-elements // (least * CALL_PIECES)))",
        "least",
        f"{BOUNCE}::test_a_large_call_leaves_room_for_another_in_its_lane",
    ),
    mutation(
        "tensors of another backend's device",
        "lossycoll/backend/devices.py",
        'if of == device and backend not in ("", "lossy"):',
        'if of == device and backend not in ("", "lossy", "gloo"):',
        "tests/backend/test_devices.py::test_tensors_of_another_backends_device_go_there",
    ),
)
