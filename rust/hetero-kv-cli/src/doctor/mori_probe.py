"""Run by `hetero-kv doctor` in an engine's environment: can the transport `mori` start there?

Takes the steps that a worker takes before it starts an engine, and prints one line after each:
the package may end the process, and whoever waits has to know where.
"""

import json

MARK = "hetero-kv-doctor "


def tell(stage, **found):
    print("\n" + MARK + json.dumps({"stage": stage, **found}), flush=True)


def run():
    try:
        from hetero_kv import mori
    except BaseException as error:
        return tell("lacks", what=f"hetero_kv cannot be imported ({type(error).__name__}: {error})")
    try:
        tell("package")
        _, version = mori.load()
        tell("loaded", version=version)
        mori.check_machine()
        tell("machine")
    except mori.MoriError as error:
        tell("lacks", what=str(error)[:1000])


run()
