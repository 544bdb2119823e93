"""Comparison of the two classes: a test that passes for MarianMT must not be skipped for this model."""

VANILLA, MARIAN = "VanillaTransformerConformanceTest", "MarianConformanceTest"
outcomes: dict[str, dict[str, str]] = {VANILLA: {}, MARIAN: {}}


def pytest_runtest_logreport(report):
    _, class_name, test = report.nodeid.split("::")[-3:]
    if report.when == "call" or report.outcome != "passed":  # a skip may come from setup
        earlier = outcomes[class_name].get(test)
        outcomes[class_name][test] = "failed" if "failed" in (earlier, report.outcome) else earlier or report.outcome


def skipped_only_for_vanilla() -> list[str]:
    passed = {test for test, outcome in outcomes[MARIAN].items() if outcome == "passed"}
    return sorted(test for test in passed if outcomes[VANILLA].get(test) != "passed")


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput") and skipped_only_for_vanilla():
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter):
    for class_name, tests in outcomes.items():
        counts = {name: list(tests.values()).count(name) for name in ("passed", "skipped", "failed")}
        terminalreporter.write_line(f"{class_name}: {counts}")
    for test in skipped_only_for_vanilla():
        terminalreporter.write_line(f"passes only for Marian: {test}", red=True)
