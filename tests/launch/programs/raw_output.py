"""A rank that writes bytes that are not UTF-8, a character beyond ASCII, and more lines than a pipe holds."""

import os

os.write(1, b"start \xff \xc3\xa9\n")
for number in range(3000):
    os.write(1, b"line %d of some length to fill the pipe\n" % number)
