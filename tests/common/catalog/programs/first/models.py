"""Module that is imported late."""

NAME = "first, late"
