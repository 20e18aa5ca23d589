"""Tables on the terminal. Oracle: the names in them, of which no character commands the terminal."""

from __future__ import annotations

from allstep.commands.shared.page.document import Table, print_table


def test_names_are_printed_as_they_are_but_for_what_commands_terminals(capsys):
    print_table(Table("of\x1b[2J\nruns", ["\x07", "runs"], [["a\nb\x1b[31m", "[red]"], [":fire:", "\u202e"]]))
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines)
    assert all(any(name in line for line in lines) for name in (r"a\nb\x1b[31m", "[red]", ":fire:", r"of\x1b[2J\nruns"))


def test_titles_of_columns_have_the_lines_that_they_are_given(capsys):
    print_table(Table("losses", ["step", "pytorch\nruns\x1b[2J"], [["1", "0.25"]]))
    first, second = capsys.readouterr().out.splitlines()[2:4]
    assert first.split() == ["pytorch"] and second.split() == ["step", r"runs\x1b[2J"]
