"""`python -I -m exeat`: the same command as the console script `exeat`."""

from exeat.cli import main

main()
