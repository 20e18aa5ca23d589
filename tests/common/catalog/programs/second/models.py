"""Module that is imported late."""

NAME = "second, late"
