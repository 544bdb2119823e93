"""Holds the two classes against each other: no test may be skipped for our model that runs for stock Marian."""

OURS, MARIAN = "VanillaTransformerConformanceTest", "MarianConformanceTest"
outcomes: dict[str, dict[str, str]] = {OURS: {}, MARIAN: {}}


def pytest_runtest_logreport(report):
    _, class_name, test = report.nodeid.split("::")[-3:]
    if report.when == "call" or report.outcome != "passed":  # a skip may come from setup
        known = outcomes[class_name].get(test)
        outcomes[class_name][test] = "failed" if "failed" in (known, report.outcome) else known or report.outcome


def skipped_for_us_alone() -> list[str]:
    ran = {test for test, outcome in outcomes[MARIAN].items() if outcome == "passed"}
    return sorted(test for test in ran if outcomes[OURS].get(test) != "passed")


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput") and skipped_for_us_alone():
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter):
    for class_name, tests in outcomes.items():
        counts = {name: list(tests.values()).count(name) for name in ("passed", "skipped", "failed")}
        terminalreporter.write_line(f"{class_name}: {counts}")
    for test in skipped_for_us_alone():
        terminalreporter.write_line(f"runs for Marian but not for us: {test}", red=True)
