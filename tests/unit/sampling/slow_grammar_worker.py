"""The worker of `sampling.grammar_worker`; but "spin" computes for ever, and "sleep" does nothing for ever."""

import signal

from tiercel.sampling import grammar_worker

to_grammar = grammar_worker.to_grammar


def slow(form, text, options):
    while text == "spin":
        pass
    if text == "sleep":
        signal.pause()
    return to_grammar(form, text, options)


if __name__ == "__main__":
    grammar_worker.to_grammar = slow
    grammar_worker.main()
