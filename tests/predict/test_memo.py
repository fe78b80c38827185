"""Answers are kept for what is the same thing, not for what merely looks alike."""

from orchestrator.predict.memo import remembered


def test_a_thing_is_known_again_and_its_equal_is_not() -> None:
    asked: list[tuple[list[int], int]] = []

    @remembered(identities=1, size=2)
    def total(numbers: list[int], factor: int) -> int:
        asked.append((numbers, factor))
        return factor * sum(numbers)

    one, alike = [1, 2], [1, 2]
    assert [total(one, 3), total(one, 3), total(alike, 3), total(one, 2)] == [9, 9, 9, 6]
    assert [(numbers is one, factor) for numbers, factor in asked] == [(True, 3), (False, 3), (True, 2)]


def test_the_oldest_answer_goes_first_and_comes_back_right() -> None:
    @remembered(identities=1, size=1)
    def first(numbers: list[int]) -> int:
        return numbers[0]

    # a list that is gone must not lend its place in memory, and so its answer, to another
    assert [first([number]) for number in range(50)] == list(range(50))
