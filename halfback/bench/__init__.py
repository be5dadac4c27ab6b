"""The benchmark against what one would use instead, on your own GPU: `halfback bench`. Nothing in the library imports it.

models.py    what is trained, and how large           rows.py      which methods on which models
peers.py     what one would use instead               measure.py   time and peak of a step, and the arithmetic floor
work.py      a row in its process                     run.py       the processes, one row timed at a time
fits.py      the largest that fits in a room          growth.py    how cost grows
results.py   the file of results                      picture.py   time against memory
promises.py  what we promise, and whether it is kept
"""
