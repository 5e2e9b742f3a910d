"""Which epoch and place a step of a run in phases belongs to."""

import pytest

from elle.data.phases import Phase, Timetable, format_phases, parse_phases

IMAGENET = "6:128:512,6:224:224,3:288:128"


def test_phases_are_read_as_text_and_as_numbers():
    phases = parse_phases(IMAGENET)
    assert phases == (Phase(6, 128, 512), Phase(6, 224, 224), Phase(3, 288, 128))
    assert parse_phases([[6, 128, 512], [6, 224, 224], [3, 288, 128]]) == phases
    assert parse_phases(phases) == phases
    assert format_phases(phases) == IMAGENET


@pytest.mark.parametrize(
    "value",
    [
        *("", "6:128", "6:128:512:1", "0:128:512", "6:4:512", "6:128:x", 6, [6, 128], [[]], []),
        *([[6.5, 128, 512]], [[6, 128, True]]),
    ],
)
def test_what_is_no_list_of_phases_is_refused_with_an_example(value):
    with pytest.raises(ValueError, match="EPOCHS:IMAGE_SIZE:BATCH"):
        parse_phases(value)


def test_every_step_has_its_place():
    timetable = Timetable((Phase(2, 16, 4), Phase(1, 32, 3), Phase(2, 48, 100)), images=10)
    lengths = [2, 2, 3, 1, 1]
    assert [timetable.steps(epoch) for epoch in range(5)] == lengths
    assert [timetable.batch(epoch) for epoch in range(5)] == [4, 4, 3, 10, 10]
    assert [timetable.size(epoch) for epoch in range(5)] == [16, 16, 32, 48, 48]
    assert [timetable.starts_phase(epoch) for epoch in range(5)] == [True, False, True, True, False]
    places = [(epoch, k) for epoch, length in enumerate(lengths) for k in range(length)]
    assert [timetable.place(step) for step in range(9)] == places
    assert timetable.place(9) == (5, 0)
    assert (timetable.epochs, timetable.total_steps, timetable.longest_epoch) == (5, 9, 3)


def test_a_batch_larger_than_the_set_is_told():
    assert Timetable((Phase(1, 16, 4), Phase(1, 16, 10)), images=10).note_on_batches() is None
    cut = Timetable((Phase(1, 16, 4), Phase(1, 16, 11), Phase(1, 16, 64)), images=10).note_on_batches()
    assert cut == "batch=11, batch=64: there are 10 training images, and a step takes all of them"


def test_a_schedule_follows_the_epochs_whatever_their_number_of_steps():
    timetable = Timetable(parse_phases(IMAGENET), images=1_281_167 - 1024)
    for epoch, share in ((0, 0), (6, 6 / 15), (12, 12 / 15)):
        first = sum(timetable.steps(e) for e in range(epoch))
        assert timetable.progress(first) == pytest.approx(share, abs=1e-4)
        assert timetable.place(first) == (epoch, 0)


def test_one_phase_has_the_shares_of_its_steps():
    timetable = Timetable((Phase(30, 32, 128),), images=48_976)
    assert all(
        timetable.progress(step) == (step + 0.5) / timetable.total_steps for step in range(timetable.total_steps)
    )


def test_steps_are_counted_from_where_their_phase_begins():
    timetable = Timetable((Phase(2, 8, 4), Phase(1, 16, 3)), images=10)
    assert [timetable.into_phase(step) for step in range(7)] == [0, 1, 2, 3, 0, 1, 2]
