from scratch import *
pytest_plugins = ["pytester"]
def test_a(project):
    project.write("test_scale.py", TWO_LINES)
    b = project.accept()
    project.measured(times())
    r = project.gate()
    print(r.ret)
    project.measured(times(slower=0.05))
    r = project.gate()
    print(r.ret)
def test_b(project):
    project.write("test_scale.py", TWO_LINES)
    print(project.commit())
    b = project.accept()
    project.measured(times(slower=0.05))
    r = project.gate()
    print(r.ret, project.workers.calls)
    r=project.cli("list")
    print(r.exit_code, r.output)
