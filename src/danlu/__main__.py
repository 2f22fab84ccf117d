"""`python -m danlu` is `danlu`: for machines where only the Python is on the path, such as the nodes of a job."""

from danlu.cli import main

main()
