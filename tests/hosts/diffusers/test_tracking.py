"""The tracker alone: run, step and branch from what pipelines show."""

from types import SimpleNamespace

import pytest
import torch

from residua import IntegrationError
from residua.hosts.diffusers.tracking import Offset, Tracker


class Loop:
    def __init__(self, scheduler=None, steps=None):
        self.tracker = Tracker(lambda: scheduler, steps)

    @property
    def new_runs(self):
        return self.tracker.runs

    def at(self, timestep, branch=None, **info):
        if branch is not None:
            self.tracker.enter(branch, info)
        self.tracker.advance(timestep)
        self.tracker.leave()
        return self.tracker.step, self.tracker.branch


def test_the_context_names_step_and_branch():
    loop = Loop()
    loop.tracker.enter("cond", {"step_index": 3, "num_inference_steps": 7})
    loop.tracker.advance(torch.tensor([1.0]))
    assert (loop.tracker.step, loop.tracker.branch, loop.tracker.total_steps()) == (3, "cond", 7)
    loop.tracker.leave()
    assert loop.tracker.total_steps() is None


def test_the_scheduler_tells_the_step_from_the_second_on():
    scheduler = SimpleNamespace(step_index=None, timesteps=torch.arange(4))
    loop = Loop(scheduler)
    assert loop.at(torch.tensor([9]), "cond") == (0, "cond")
    assert loop.at(torch.tensor([9]), "uncond") == (0, "uncond")
    scheduler.step_index = 1
    assert loop.at(torch.tensor([5]), "cond") == (1, "cond")
    assert loop.tracker.total_steps() == 4
    assert loop.new_runs == 1


def test_a_schedule_that_begins_later_counts_from_there():
    scheduler = SimpleNamespace(step_index=6, begin_index=6, timesteps=torch.arange(10))
    loop = Loop(scheduler)
    assert loop.at(torch.tensor([9]))[0] == 0
    assert loop.tracker.total_steps() == 4


def test_a_new_schedule_is_a_new_run():
    scheduler = SimpleNamespace(step_index=2, timesteps=torch.arange(4))
    loop = Loop(scheduler)
    loop.at(torch.tensor([9]))
    scheduler.timesteps = torch.arange(4)
    loop.at(torch.tensor([9]))
    assert loop.new_runs == 2


def test_a_step_back_is_a_new_run():
    scheduler = SimpleNamespace(step_index=2, timesteps=torch.arange(4))
    loop = Loop(scheduler)
    loop.at(torch.tensor([9]))
    scheduler.step_index = 0
    assert loop.at(torch.tensor([9])) == (0, "call 0")
    assert loop.new_runs == 2


def test_unnamed_calls_are_counted_within_their_step():
    scheduler = SimpleNamespace(step_index=0, timesteps=torch.arange(4))
    loop = Loop(scheduler)
    assert [loop.at(torch.tensor([9]))[1] for _ in range(2)] == ["call 0", "call 1"]
    scheduler.step_index = 1
    assert [loop.at(torch.tensor([8]))[1] for _ in range(2)] == ["call 0", "call 1"]


def test_without_a_scheduler_changes_of_the_timestep_count():
    loop = Loop(steps=3)
    seen = [loop.at(torch.tensor([value]), "cond")[0] for value in (900, 900, 600, 300, 900, 600)]
    assert seen == [0, 0, 1, 2, 0, 1]
    assert loop.new_runs == 2 and loop.tracker.total_steps() == 3


def test_a_scheduler_that_is_never_stepped():
    """Diffusion forcing steps copies of the scheduler; its timesteps are per frame and may rise."""
    loop = Loop(SimpleNamespace(step_index=None, timesteps=torch.arange(4)))
    seen = [loop.at(torch.tensor([row]), "cond")[0] for row in ([9, 9], [9, 9], [6, 9], [3, 6], [9, 3])]
    assert seen == [0, 0, 1, 2, 3]
    assert loop.new_runs == 1


def test_forget_begins_anew():
    scheduler = SimpleNamespace(step_index=2, timesteps=torch.arange(4))
    loop = Loop(scheduler)
    loop.at(torch.tensor([9]))
    loop.tracker.forget()
    loop.at(torch.tensor([9]))
    assert loop.new_runs == 2


def test_nothing_that_tells_the_step_is_an_error():
    with pytest.raises(IntegrationError, match="cannot tell the denoising step"):
        Loop().at(None)


def test_a_run_that_begins_in_the_middle_of_the_schedule_counts_from_there():
    """Video-to-video with strength: the first index that the scheduler says is not 1."""
    scheduler = SimpleNamespace(step_index=None, timesteps=torch.arange(10))
    loop = Loop(scheduler)
    assert loop.at(torch.tensor([400]), "cond")[0] == 0
    for step, index in enumerate((7, 8, 9), start=1):
        scheduler.step_index = index
        assert loop.at(torch.tensor([400 - step]), "cond")[0] == step
    assert loop.tracker.total_steps() == 4 and loop.new_runs == 1


def test_the_second_transformer_shares_where_the_run_began():
    scheduler = SimpleNamespace(step_index=None, timesteps=torch.arange(10))
    shared = Offset()
    first, second = (Tracker(lambda: scheduler, offset=shared) for _ in range(2))
    first.advance(torch.tensor([400]))
    scheduler.step_index = 7
    first.advance(torch.tensor([300]))
    scheduler.step_index = 8
    second.advance(torch.tensor([200]))
    assert (first.step, second.step, second.total_steps()) == (1, 2, 4)


def test_a_scheduler_that_stands_still_is_not_believed(caplog):
    """Another one drives the transformer; this one is left over from an earlier run."""
    loop = Loop(SimpleNamespace(step_index=7, timesteps=torch.arange(10)))
    seen = []
    for value in (900, 600, 300, 900, 600):
        seen += [loop.at(torch.tensor([value]), branch)[0] for branch in ("cond", "uncond")]
    assert seen[2:] == [1, 1, 2, 2, 0, 0, 1, 1]
    assert loop.new_runs == 2
    [said] = [record.message for record in caplog.records]
    assert "does not move" in said and "scheduler=" in said


def test_anonymous_passes_of_a_scheduler_that_stands_still():
    loop = Loop(SimpleNamespace(step_index=7, timesteps=torch.arange(10)))
    assert [loop.at(torch.tensor([value]))[0] for value in (900, 900, 600, 600)][2:] == [1, 1]


def test_samplers_that_ask_twice_in_a_step_are_not_taken_for_it(caplog):
    scheduler = SimpleNamespace(step_index=3, timesteps=torch.arange(10))
    loop = Loop(scheduler)
    assert [loop.at(torch.tensor([900]), "cond")[0] for _ in range(3)] == [3, 3, 3]
    assert not caplog.records


@pytest.mark.parametrize("left_at", [10, 4])
def test_a_scheduler_left_over_from_another_pipeline(left_at, caplog):
    """`from_pipe` shares the transformer; if the new pipeline gets a scheduler of its own, ours stays where
    its last run ended, or was interrupted."""
    scheduler = SimpleNamespace(step_index=None, timesteps=torch.arange(10, 0, -1))
    loop = Loop(scheduler)
    for step in range(3):
        loop.at(torch.tensor([10 - step]), "cond")
        scheduler.step_index = step + 1
    scheduler.step_index = left_at
    loop.tracker.forget()
    assert [loop.at(torch.tensor([value]), "cond")[0] for value in (999, 600, 300, 999)] == [0, 1, 2, 0]
    assert len(caplog.records) == 1 and "does not move" in caplog.text
    scheduler.timesteps, scheduler.step_index = torch.arange(20, 0, -1), None  # it runs again itself
    for step in range(3):
        assert loop.at(torch.tensor([20 - step]), "cond")[0] == step
        scheduler.step_index = step + 1
    assert len(caplog.records) == 1


def test_a_scheduler_that_is_used_up_before_the_first_run_seen(caplog):
    loop = Loop(SimpleNamespace(step_index=10, timesteps=torch.arange(10)))
    assert [loop.at(torch.tensor([value]), "cond")[0] for value in (900, 900, 600)] == [0, 0, 1]
    assert "does not move" in caplog.text


def test_a_reset_in_the_middle_of_a_run_keeps_the_place(caplog):
    scheduler = SimpleNamespace(step_index=2, timesteps=torch.tensor([9.0, 8.0, 7.0, 6.0]))
    loop = Loop(scheduler)
    loop.at(torch.tensor([7.0]), "cond")
    scheduler.step_index = 3
    loop.tracker.forget()
    assert loop.at(torch.tensor([6.0]), "cond")[0] == 3 and not caplog.records


def flow(steps=8, shift=3.0):
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=[1 - step / steps for step in range(steps)])  # as pipelines do
    return scheduler


def test_a_flow_scheduler_says_what_every_step_removes():
    scheduler = flow()
    loop = Loop(scheduler)
    loop.at(scheduler.timesteps[0])
    removed = loop.tracker.removed()
    assert len(removed) == 8 and sum(removed) == pytest.approx(1.0)
    assert list(removed) == sorted(removed)  # with a shift most of the noise goes in the last steps
    scheduler.set_timesteps(sigmas=[1.0, 0.5])
    loop.at(scheduler.timesteps[0])
    assert len(loop.tracker.removed()) == 2  # a new run


def test_a_run_that_begins_in_the_middle_removes_what_is_left():
    scheduler = flow()
    scheduler.set_begin_index(5)
    loop = Loop(scheduler)
    loop.at(scheduler.timesteps[5])
    assert len(loop.tracker.removed()) == 3
    assert sum(loop.tracker.removed()) == pytest.approx(float(scheduler.sigmas[5]))


@pytest.mark.parametrize(
    "scheduler",
    [
        SimpleNamespace(step_index=None, timesteps=torch.arange(4)),  # says no levels
        SimpleNamespace(step_index=None, timesteps=torch.arange(4), sigmas=torch.tensor([9.0, 4, 1, 0.1, 0])),
        SimpleNamespace(step_index=None, timesteps=torch.arange(4), sigmas=torch.tensor([1.0, 0])),
    ],
)
def test_other_schedulers_do_not(scheduler):
    loop = Loop(scheduler)
    loop.at(torch.tensor([9]))
    assert loop.tracker.removed() == ()


def test_a_scheduler_that_stands_still_does_not_either():
    scheduler = flow()
    scheduler._step_index = 8  # all its steps are taken
    loop = Loop(scheduler)
    loop.at(torch.tensor([900.0]))
    assert loop.tracker.removed() == ()
