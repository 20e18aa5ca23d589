"""Guard between observers and script: all hooks run through it, so that no error of an observer reaches the script.

An observer of a function is a generator: it runs until its `yield` before the call, and the rest after it, where the
`yield` returns the result of the call. It may yield other arguments for the call.
"""

import functools
from collections.abc import Callable, Generator
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Observation = Callable[..., Generator["Arguments | None", Any, None]]


class Guard:
    """Runs observers, and notes those that fail."""

    def __init__(self, note: Callable[[str, Exception], None]) -> None:
        self._note = note

    def quiet(self, what: str, function: Callable[..., Any], default: Any = None) -> Callable[..., Any]:
        """Return a function that returns `default`, and notes what is not observed, if `function` fails.

        The name `what` appears in the report.
        """

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self._note(what, error)
                return default

        return guarded

    def around(self, what: str, observe: Observation) -> Callable[[Any], Any]:
        """Return what `replace` needs to observe a function's calls, named `what` in the report."""

        def make(call: Any) -> Any:
            @functools.wraps(call)
            def observed(*args: Any, **kwargs: Any) -> Any:
                running, changed = self._begin(what, observe, args, kwargs)
                if changed is not None:
                    args, kwargs = changed
                try:
                    result = call(*args, **kwargs)
                except BaseException:
                    if running:
                        self.quiet(what, running.close)()
                    raise
                if running:
                    self.quiet(what, _finish)(running, result)
                return result

            return observed

        return make

    def _begin(self, what: str, observe: Observation, args: Any, kwargs: Any) -> tuple[Any, Arguments | None]:
        try:
            running = observe(*args, **kwargs)
            return running, next(running)
        except StopIteration:
            return None, None
        except Exception as error:
            self._note(what, error)
            return None, None


def _finish(running: Generator[Any, Any, None], result: Any) -> None:
    try:
        running.send(result)
    except StopIteration:
        return
    running.close()
