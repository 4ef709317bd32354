"""`make gpu`: what only a GPU can show, in parts of at most eight minutes, each with one table and a JSON file.

    python -m benchmarks.gpu                      # all parts
    python -m benchmarks.gpu syncs speed          # some
    python -m benchmarks.gpu --wheels FOLDER      # in an environment of its own, packages from a folder, no network

Without a GPU every part says so and runs what a CPU can: the table then says what did not run. See docs/check.md.
"""
