from dsattn.cli.__main__ import main


def test_the_report_is_written_again(run_dir, capsys):
    report = run_dir / "report.html"
    report.unlink()
    assert main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out.strip() == str(report)
    assert "<html" in report.read_text()


def test_a_folder_that_is_none_is_an_error(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nothing")]) == 1
    assert "nothing" in capsys.readouterr().err
