"""`hf-parallel prove`: evidence, on the user's own script, that a layout trains with the numbers of one process.

    hf-parallel prove --parallel tp=2,pp=2 train.py --output_dir out

The script runs small, three times at once: in one process, in one process whose rounding differs, and under the layout
in forked processes. The second run tells what rounding may do to each number; the third must stay within that.

small_run.py    a process that is proved: small sizes, sums in another order, no file of the user's
record.py       a run writes down its numbers
processes.py    fork the processes of a run
compare.py      every number of the layout beside the one process's
locate.py       the first module where the two part, and the kind of error that it looks like
certificate.py  prove.json, and the line at the start of the real run
bisect.py       the first difference between two recorded runs

`hooks/proving.py`, `proving_models.py` and `proving_loops.py` put the small sizes and the observers into Transformers
and Accelerate.
"""
