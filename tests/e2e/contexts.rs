//! Code contexts: state that is kept, kernels that die, clients and kernels that misbehave.

use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

use e2e::http::HttpResponse;
use e2e::run::ORDINARY_USER;
use e2e::sandbox::RemoteSandbox;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

/// All events of one code run.
#[derive(Debug)]
struct CodeRunEvents {
    events: Vec<Value>,
}

impl CodeRunEvents {
    fn of(answer: &HttpResponse) -> Self {
        assert_eq!(answer.status, 200, "{}", answer.text());
        let events: Vec<Value> = answer.text().lines().filter(|line| !line.is_empty()).map(parse).collect();
        let ran = Self { events };
        ran.check_order();
        ran
    }

    /// The start event comes first, the end event last, and there is only one end.
    fn check_order(&self) {
        let kinds: Vec<&str> =
            self.events.iter().map(|event| event["type"].as_str().expect("a text")).collect();
        assert_eq!(kinds.first(), Some(&"init"), "{kinds:?}");
        let ends = kinds.iter().filter(|kind| ["error", "execution_complete"].contains(kind)).count();
        let last = kinds.last().is_some_and(|kind| ["error", "execution_complete"].contains(kind));
        assert!(ends == 1 && last, "{kinds:?}");
        assert!(self.events.iter().all(|event| event["timestamp"].is_i64()), "{:?}", self.events);
    }

    fn of_kind(&self, kind: &str) -> Vec<&Value> {
        self.events.iter().filter(|event| event["type"] == kind).collect()
    }

    fn printed(&self, stream: &str) -> String {
        self.of_kind(stream).iter().filter_map(|event| event["text"].as_str()).collect()
    }

    /// The plain text of the results, one to a line.
    fn results(&self) -> String {
        let texts: Vec<&str> = self
            .of_kind("result")
            .iter()
            .map(|event| event["results"]["text"].as_str().unwrap_or("-"))
            .collect();
        texts.join("\n")
    }

    fn error(&self) -> &Value {
        self.of_kind("error").first().map_or(&Value::Null, |event| &event["error"])
    }

    fn error_name(&self) -> &str {
        self.error()["ename"].as_str().unwrap_or("none")
    }

    fn count(&self) -> Option<i64> {
        self.of_kind("execution_count").first()?["execution_count"].as_i64()
    }

    fn id(&self) -> &str {
        self.events[0]["text"].as_str().expect("a text")
    }
}

fn parse(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in `{line}`"))
}

fn open(sandbox: &mut RemoteSandbox, language: &str) -> String {
    let answer = sandbox.request_inside("POST", "code/context", &json!({"language": language}));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let context = answer.json();
    assert_eq!(context["language"], language);
    context["id"].as_str().expect("a text").to_owned()
}

fn run(sandbox: &mut RemoteSandbox, context: &str, code: &str) -> CodeRunEvents {
    CodeRunEvents::of(&sandbox.request_inside(
        "POST",
        "code",
        &json!({"code": code, "context": {"id": context}}),
    ))
}

fn run_in(sandbox: &mut RemoteSandbox, language: &str, code: &str) -> CodeRunEvents {
    CodeRunEvents::of(&sandbox.request_inside(
        "POST",
        "code",
        &json!({"code": code, "context": {"language": language}}),
    ))
}

/// Code that is still running, with its events as they arrive.
struct LiveRun {
    lines: std::io::Lines<BufReader<e2e::http::ResponseBody>>,
    id: String,
}

impl LiveRun {
    fn start(sandbox: &mut RemoteSandbox, context: &str, code: &str) -> Self {
        let body = json!({"code": code, "context": {"id": context}});
        let answer = sandbox.request_streaming("POST", "code", &body);
        assert_eq!(answer.status, 200);
        let mut live = Self { lines: BufReader::new(answer.body).lines(), id: String::new() };
        live.id = live.next()["text"].as_str().expect("a text").to_owned();
        live
    }

    fn next(&mut self) -> Value {
        let line = self.lines.find(|line| line.as_ref().map_or(true, |line| !line.is_empty()));
        parse(&line.expect("more comes").expect("the stream continues"))
    }

    fn wait_for(&mut self, kind: &str) -> Value {
        loop {
            let event = self.next();
            if event["type"] == kind {
                return event;
            }
        }
    }
}

#[test]
fn output_results_and_errors_have_the_shapes_of_the_reference() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let context = open(&mut sandbox, "python");
    let first = run(&mut sandbox, &context, "import sys\nprint('out')\nprint('err', file=sys.stderr)\n2 + 2");
    assert_eq!(first.id(), context);
    assert_eq!((first.printed("stdout"), first.printed("stderr")), ("out\n".to_owned(), "err\n".to_owned()));
    assert_eq!(first.of_kind("result")[0]["results"], json!({"text": "4", "text/plain": "4"}));
    assert_eq!((first.count(), first.error()), (Some(1), &Value::Null));
    let second = run(&mut sandbox, &context, "def f():\n    return missing\nf()");
    assert_eq!(second.count(), Some(2));
    assert_eq!(second.error()["evalue"], "name 'missing' is not defined");
    let traceback: Vec<&str> =
        second.error()["traceback"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    assert_eq!(traceback[0], "Traceback (most recent call last):");
    assert!(traceback.contains(&"    return missing"), "{traceback:?}");
    assert!(!traceback.iter().any(|line| line.contains("<string>")), "{traceback:?}");
}

/// Code run in one context in this order: what it prints, its results, its error.
const PYTHON: &[(&str, &str, &str, &str)] = &[
    ("x = 5", "", "", "none"),
    ("x", "", "5", "none"),
    ("_ + 1", "", "6", "none"),
    ("x;", "", "", "none"),
    ("import asyncio\nawait asyncio.sleep(0)\nprint('awaited')", "awaited\n", "", "none"),
    ("async def f():\n    return 7\nawait f()", "", "7", "none"),
    ("task = asyncio.get_event_loop().create_task(f())\nawait task", "", "7", "none"),
    ("if", "", "", "SyntaxError"),
    ("1 / 0", "", "", "ZeroDivisionError"),
    ("def g(): g()\ng()", "", "", "RecursionError"),
    ("input('?')", "", "", "StdinNotImplementedError"),
    ("import sys; sys.exit()", "", "", "none"),
    ("sys.exit('why')", "", "", "SystemExit"),
    (
        "class A:\n    def __repr__(self): raise ValueError('no')\nA()",
        "",
        "<A object, whose repr() raised ValueError: no>",
        "none",
    ),
    ("'\\udcff'", "", "'\\udcff'", "none"),
    ("print('\\udcff ü')", "\\udcff ü\n", "", "none"),
    ("len(str('x' * 50_000_000))", "", "50000000", "none"),
    ("import os\nos.system('echo child')", "child\n", "0", "none"),
    ("os.write(1, b'raw\\n');", "raw\n", "", "none"),
    (
        "pid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('parent' if pid else 'child')",
        "child\nparent\n",
        "",
        "none",
    ),
    ("import pickle\npickle.loads(pickle.dumps(A)) is A", "", "True", "none"),
    ("%matplotlib inline\nif True:\n    !echo shell; exit 3\n_exit_code", "shell\n", "3", "none"),
    ("'''\n!no\n'''", "", "'\\n!no\\n'", "none"),
    ("sys.stdout.close()", "", "", "none"),
    ("print('again')", "again\n", "", "none"),
    ("sys.stdout = None", "", "", "none"),
    ("print('and again')", "and again\n", "", "none"),
    ("[line for line in open('/proc/self/cmdline')] and __name__", "", "'__main__'", "none"),
];

#[test]
fn a_python_context_behaves_as_python_does() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let context = open(&mut sandbox, "python");
    for (code, printed, results, error) in PYTHON {
        let ran = run(&mut sandbox, &context, code);
        let seen = (ran.printed("stdout"), ran.results(), ran.error_name().to_owned());
        assert_eq!(
            (seen.0.as_str(), seen.1.as_str(), seen.2.as_str()),
            (*printed, *results, *error),
            "{code}"
        );
    }
}

#[test]
fn rich_results_are_sent_beside_plain_text() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let code = "class Rich:
    def __repr__(self): return 'plain'
    def _repr_html_(self): return '<b>'
    def _repr_svg_(self): return '<svg/>'
    def _repr_png_(self): return b'\\x89PNG'
    def _repr_json_(self): return {'a': [1]}
    def _repr_mimebundle_(self, include=None, exclude=None): return {'application/x-own': 'own'}
display(Rich())
Rich()";
    let ran = run_in(&mut sandbox, "python", code);
    let expected = json!({
        "text": "plain", "text/plain": "plain", "text/html": "<b>", "image/svg+xml": "<svg/>",
        "image/png": "iVBORw==", "application/json": "{\"a\": [1]}", "application/x-own": "own",
    });
    let results = ran.of_kind("result");
    assert_eq!(results.len(), 2, "{ran:?}");
    assert!(results.iter().all(|result| result["results"] == expected), "{results:?}");
    let large =
        run_in(&mut sandbox, "python", "class L:\n    def _repr_html_(self): return 'x' * 20_000_000\nL()");
    let forms = &large.of_kind("result")[0]["results"];
    assert!(forms["text"].is_string() && forms.get("text/html").is_none(), "{:.200}", forms.to_string());
    let long = run_in(&mut sandbox, "python", "list(range(10_000_000))");
    assert!(long.results().ends_with("[10000000 in all]]") && long.results().len() < 10_000);
}

#[test]
fn contexts_are_listed_isolated_and_closed() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let (one, two) = (open(&mut sandbox, "python"), open(&mut sandbox, "python"));
    let shell = open(&mut sandbox, "bash");
    run(&mut sandbox, &one, "secret = 1");
    assert_eq!(run(&mut sandbox, &two, "secret").error_name(), "NameError");
    assert_eq!(run_in(&mut sandbox, "python", "secret").error_name(), "NameError");
    run_in(&mut sandbox, "py", "kept = 3");
    assert_eq!(run_in(&mut sandbox, "Python", "kept").results(), "3");
    let list = |sandbox: &mut RemoteSandbox, query: &str| -> usize {
        let answer = sandbox.request_inside("GET", &format!("code/contexts{query}"), &Value::Null);
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json().as_array().expect("a list").len()
    };
    assert_eq!((list(&mut sandbox, "?language=python"), list(&mut sandbox, "")), (3, 4));
    let found = sandbox.request_inside("GET", &format!("code/contexts/{shell}"), &Value::Null).json();
    assert_eq!(found, json!({"id": shell, "language": "bash"}));
    assert_eq!(sandbox.request_inside("DELETE", &format!("code/contexts/{one}"), &Value::Null).status, 200);
    for (method, path) in [("GET", "code/contexts/"), ("DELETE", "code/contexts/"), ("DELETE", "code?id=")] {
        for id in [one.as_str(), "nonsense"] {
            let answer = sandbox.request_inside(method, &format!("{path}{id}"), &Value::Null);
            assert_eq!((answer.status, answer.json()["code"].as_str()), (404, Some("CONTEXT_NOT_FOUND")));
        }
    }
    assert_eq!(sandbox.request_inside("DELETE", "code/contexts?language=python", &Value::Null).status, 200);
    assert_eq!((list(&mut sandbox, "?language=python"), list(&mut sandbox, "")), (0, 1));
    // The default context is deleted with the others, and comes back without its state.
    assert_eq!(run_in(&mut sandbox, "python", "kept").error_name(), "NameError");
}

#[test]
fn invalid_requests_are_refused_with_a_reason() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let context = open(&mut sandbox, "python");
    let mut check = |method: &str, path: &str, body: Value, status: u16, code: &str, word: &str| {
        let answer = sandbox.request_inside(method, path, &body);
        assert_eq!(answer.status, status, "{path} {body}: {}", answer.text());
        let reported = answer.json();
        assert_eq!(reported["code"], code, "{reported}");
        assert!(reported["message"].as_str().expect("a text").contains(word), "{reported}");
    };
    let unknown = "0123456789abcdef0123456789abcdef";
    check("POST", "code", json!({}), 400, "INVALID_REQUEST_BODY", "code");
    check("POST", "code", json!({"code": ""}), 400, "INVALID_REQUEST_BODY", "code");
    check("POST", "code", json!({"code": "a\u{0}"}), 400, "INVALID_REQUEST_BODY", "NUL");
    check(
        "POST",
        "code",
        json!({"code": "1", "context": {"id": unknown}}),
        404,
        "CONTEXT_NOT_FOUND",
        unknown,
    );
    let other = json!({"code": "1", "context": {"id": context, "language": "bash"}});
    check("POST", "code", other, 400, "INVALID_REQUEST_BODY", "python");
    check("POST", "code/context", json!({"language": "no such"}), 400, "INVALID_REQUEST_BODY", "language");
    check("POST", "code/context", json!({"language": 7}), 400, "INVALID_REQUEST_BODY", "");
    check("POST", "code/context", json!({"language": "cobol"}), 400, "NOT_SUPPORTED", "cobol");
    check("DELETE", "code", Value::Null, 400, "MISSING_QUERY", "id");
    check("DELETE", "code/contexts", Value::Null, 400, "MISSING_QUERY", "language");
    let hidden = "mkdir -p /opt/none; mv /usr/bin/python3 /opt/none";
    assert_eq!(sandbox.run(hidden).code, Some(0));
    let answer = sandbox.request_inside("POST", "code/context", &json!({"language": "python"}));
    assert_eq!(answer.status, 400, "{}", answer.text());
    assert!(answer.text().contains("`python3` was not found"), "{}", answer.text());
}

#[test]
fn an_ordinary_users_sandboxes_have_contexts_too() {
    let server = ServerBuilder::new().as_user(ORDINARY_USER).env("CORACLE_REQUIRE_LIMITS", "false").start();
    let mut sandbox = server.create_sandbox_with(&json!({"resourceLimits": {}}));
    let context = open(&mut sandbox, "python");
    assert_eq!(run(&mut sandbox, &context, "2 + 2").results(), "4");
    let mut live = LiveRun::start(&mut sandbox, &context, "import time\ntime.sleep(600)");
    assert_eq!(sandbox.request_inside("DELETE", &format!("code?id={context}"), &Value::Null).status, 200);
    assert_eq!(live.wait_for("error")["error"]["ename"], "KeyboardInterrupt");
    let killed = run(&mut sandbox, &context, "import os\nos.kill(os.getpid(), 9)");
    assert_eq!(killed.error_name(), "KernelDied");
    assert_eq!(run(&mut sandbox, &context, "3").results(), "3");
    // An error message from our own program shows that it could be executed.
    let answer = sandbox.request_inside("POST", "code/context", &json!({"language": "cobol"}));
    assert_eq!(answer.json()["code"], "NOT_SUPPORTED", "{}", answer.text());
    assert!(!answer.text().contains("cannot be executed"), "{}", answer.text());
}

#[test]
fn missing_working_directory_of_a_context_is_created() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    for (language, code) in [("python", "import os; print(os.getcwd())"), ("bash", "pwd")] {
        let request = json!({"language": language, "cwd": "/tmp/new/place"});
        let answer = sandbox.request_inside("POST", "code/context", &request);
        assert_eq!(answer.status, 200, "{}", answer.text());
        let context = answer.json()["id"].as_str().expect("a text").to_owned();
        assert_eq!(run(&mut sandbox, &context, code).printed("stdout"), "/tmp/new/place\n");
    }
}

#[test]
fn an_interrupt_ends_the_code_and_leaves_the_state() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let context = open(&mut sandbox, "python");
    run(&mut sandbox, &context, "import time, asyncio; x = 1");
    for code in [
        "time.sleep(600)",
        "await asyncio.sleep(600)",
        "while True: pass",
        "import subprocess\nsubprocess.run(['sleep', '600'])",
    ] {
        let mut live = LiveRun::start(&mut sandbox, &context, code);
        // Immediately: the code may not have started yet.
        let path = format!("code?id={}", live.id);
        assert_eq!(sandbox.request_inside("DELETE", &path, &Value::Null).status, 200);
        assert_eq!(live.wait_for("error")["error"]["ename"], "KeyboardInterrupt", "{code}");
        assert_eq!(run(&mut sandbox, &context, "x").results(), "1");
    }
    let idle = sandbox.request_inside("DELETE", &format!("code?id={context}"), &Value::Null);
    assert_eq!(idle.status, 200, "interrupting an idle context succeeds");
    assert_eq!(run(&mut sandbox, &context, "x").results(), "1");
}

#[test]
fn context_runs_one_request_at_a_time_and_continues_without_its_reader() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let context = open(&mut sandbox, "python");
    let code = "import os, time\nprint('on', flush=True)\nwhile not os.path.exists('/tmp/go'): time.sleep(0.01)\ndone = True";
    let mut live = LiveRun::start(&mut sandbox, &context, code);
    live.wait_for("stdout");
    let busy = run(&mut sandbox, &context, "1");
    assert_eq!(busy.error_name(), "SessionBusy");
    assert!(busy.error()["evalue"].as_str().expect("a text").contains("session is busy"), "{busy:?}");
    drop(live);
    assert_eq!(run(&mut sandbox, &context, "1").error_name(), "SessionBusy");
    assert_eq!(sandbox.run("touch /tmp/go").code, Some(0));
    e2e::eventually("it has ended", || run(&mut sandbox, &context, "done").error_name() != "SessionBusy");
    assert_eq!(run(&mut sandbox, &context, "done").results(), "True");
}

#[test]
fn dead_kernel_is_reported_and_replaced() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox_with(&json!({"resourceLimits": {"cpu": "1", "memory": "256Mi"}}));
    let context = open(&mut sandbox, "python");
    let deaths = [
        ("b'x' * 1_000_000_000", "memory limit", json!({"ending": "oom"})),
        ("import os\nos.kill(os.getpid(), 9)", "signal 9", json!({"ending": "signal", "signal": 9})),
        ("import os\nos._exit(0)", "code 1", Value::Null),
        ("import ctypes\nctypes.string_at(0)", "signal 11", json!({"ending": "signal", "signal": 11})),
    ];
    for (code, words, ending) in deaths {
        run(&mut sandbox, &context, "x = 1");
        let ran = run(&mut sandbox, &context, code);
        assert_eq!(ran.error_name(), "KernelDied", "{code}: {ran:?}");
        assert!(ran.error()["evalue"].as_str().expect("a text").contains(words), "{ran:?}");
        assert_eq!(ran.error().get("coracle").unwrap_or(&Value::Null), &ending, "{ran:?}");
        let next = run(&mut sandbox, &context, "x");
        assert_eq!((next.error_name(), next.count()), ("NameError", Some(1)), "{next:?}");
    }
    // Whether it ends by itself or is killed first is a race; both outcomes are fine.
    let mute = run(&mut sandbox, &context, "import os\nos.closerange(3, 1000)\nwhile True: pass");
    assert_eq!(mute.error_name(), "KernelDied", "{mute:?}");
    assert_eq!(run(&mut sandbox, &context, "2").results(), "2");
}

#[test]
fn context_can_be_reset_while_its_code_runs() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    for (language, set, get) in [("python", "x = 1", "x"), ("bash", "export x=1", "echo $x")] {
        let context = open(&mut sandbox, language);
        run(&mut sandbox, &context, set);
        let mut live = LiveRun::start(&mut sandbox, &context, "import time\nprint('on')\ntime.sleep(600)");
        if language == "python" {
            live.wait_for("stdout");
        }
        let path = format!("code/contexts/{context}/restart");
        assert_eq!(sandbox.request_inside("POST", &path, &Value::Null).status, 200);
        live.wait_for("error");
        let after = run(&mut sandbox, &context, get);
        assert_eq!((after.results().as_str(), after.printed("stdout").trim()), ("", ""), "{after:?}");
        assert_eq!(sandbox.request_inside("POST", &path, &Value::Null).status, 200);
    }
    let unknown = sandbox.request_inside("POST", "code/contexts/nothing/restart", &Value::Null);
    assert_eq!(unknown.status, 404);
}

#[test]
fn a_sandbox_has_a_bounded_number_of_contexts() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let contexts: Vec<String> = (0..64).map(|_| open(&mut sandbox, "bash")).collect();
    let answer = sandbox.request_inside("POST", "code/context", &json!({"language": "bash"}));
    assert_eq!((answer.status, answer.header("retry-after")), (429, Some("1")), "{}", answer.text());
    assert_eq!(
        sandbox.request_inside("DELETE", &format!("code/contexts/{}", contexts[7]), &Value::Null).status,
        200
    );
    open(&mut sandbox, "bash");
}

#[test]
fn a_context_outlives_the_server() {
    let start = ServerBuilder::new();
    let mut server = ServerBuilder::new().listen("127.0.0.1:0").start();
    let (id, context) = {
        let mut sandbox = server.create_sandbox();
        let context = open(&mut sandbox, "python");
        run(&mut sandbox, &context, "x = 'kept'");
        let code = "import os, time\nprint('on', flush=True)\nwhile not os.path.exists('/tmp/go'): time.sleep(0.01)\ny = 1";
        LiveRun::start(&mut sandbox, &context, code).wait_for("stdout");
        (sandbox.id.clone(), context)
    };
    server.kill();
    server.restart(&start);
    let mut sandbox = RemoteSandbox::existing(server.client(), &id);
    let listed = sandbox.request_inside("GET", "code/contexts", &Value::Null).json();
    assert_eq!(listed, json!([{"id": context, "language": "python"}]));
    assert_eq!(sandbox.run("touch /tmp/go").code, Some(0));
    e2e::eventually("the previous run ends", || run(&mut sandbox, &context, "x").results() == "'kept'");
    assert_eq!(run(&mut sandbox, &context, "y").results(), "1");
}

#[test]
fn ten_contexts_run_side_by_side() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let contexts: Vec<String> = (0..10).map(|_| open(&mut sandbox, "python")).collect();
    let began = Instant::now();
    std::thread::scope(|scope| {
        for (number, context) in contexts.iter().enumerate() {
            let mut sandbox = sandbox.with_client(server.client());
            scope.spawn(move || {
                let code = format!("import time\ntime.sleep(2)\n{number}");
                assert_eq!(run(&mut sandbox, context, &code).results(), number.to_string());
            });
        }
    });
    let took = began.elapsed();
    assert!(took < Duration::from_secs(18), "contexts did not run in parallel: {took:?}");
}

#[test]
fn a_shell_is_a_context_too() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let context = open(&mut sandbox, "bash");
    let first = run(&mut sandbox, &context, "cd /usr; export A=1; echo hi; echo no >&2");
    assert_eq!(
        (first.count(), first.printed("stdout"), first.printed("stderr")),
        (Some(1), "hi\n".to_owned(), "no\n".to_owned())
    );
    let second = run(&mut sandbox, &context, "pwd; echo $A; (exit 7)");
    assert_eq!((second.count(), second.printed("stdout")), (Some(2), "/usr\n1\n".to_owned()));
    assert_eq!((second.error_name(), &second.error()["evalue"]), ("CommandExecError", &json!("7")));
    // At that moment the shell is about to start another program, again and again.
    for _ in 0..20 {
        let mut live = LiveRun::start(&mut sandbox, &context, "echo on; sleep 60");
        live.wait_for("stdout");
        assert_eq!(sandbox.request_inside("DELETE", &format!("code?id={context}"), &Value::Null).status, 200);
        let next = std::iter::repeat_with(|| live.next()).find(|event| event["type"] != "ping");
        assert_eq!(next.as_ref().map(|event| &event["type"]), Some(&json!("error")), "{next:?}");
    }
    assert_eq!(run(&mut sandbox, &context, "pwd").printed("stdout"), "/usr\n");
}

/// Replaces the interpreter and writes arbitrary text to the report pipe.
const HOSTILE_INTERPRETER: &str = r#"#!/bin/bash
echo ready >&4
while read -r word key json <&3; do
    head -c 5000000 /dev/urandom >&4; echo >&4
    echo "tell $key not json" >&4
    echo "tell $key {\"result\": {\"text/plain\": 7}}" >&4
    echo "tell $key {\"count\": 99999999999999999999999}" >&4
    echo "tell nobody {\"count\": 1}" >&4
    echo -n "tell $key {\"result\":{\"a\":\"" >&4; head -c 9000000 /dev/zero | tr '\0' x >&4; echo >&4
    echo "tell $key {\"result\":{\"text/plain\":\"fine\"}}" >&4
    echo "done nobody" >&4
    echo "done $key" >&4
    echo "tell $key {\"count\":1}" >&4
    echo "done $key" >&4
done
"#;

#[test]
fn malicious_kernel_affects_only_its_own_client() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    sandbox.upload("/usr/local/bin/python3", HOSTILE_INTERPRETER.as_bytes());
    let context = open(&mut sandbox, "python");
    for _ in 0..2 {
        let ran = run(&mut sandbox, &context, "1");
        assert_eq!((ran.results(), ran.error_name(), ran.count()), ("fine".to_owned(), "none", None));
        assert!(ran.printed("stderr").contains("too long or malformed"), "{:.500}", format!("{ran:?}"));
    }
    sandbox.upload("/usr/local/bin/python3", b"#!/bin/bash\necho sorry, too old >&2; exit 3\n");
    let answer = sandbox.request_inside("POST", "code/context", &json!({"language": "python"}));
    assert_eq!(answer.status, 400, "{}", answer.text());
    assert!(answer.text().contains("sorry, too old"), "{}", answer.text());
    assert_eq!(sandbox.run("echo there").stdout, "there\n");
}

#[test]
fn probe_for_reference_kernel_port_is_answered() {
    let server = TestServer::start();
    let probe = "bash -c 'exec 3<>/dev/tcp/127.0.0.1/${JUPYTER_PORT:-44771}' && exit 0 || exit 1";
    let mut sandbox = server.create_sandbox();
    assert_ne!(
        sandbox.run("exec 3<>/dev/tcp/127.0.0.1/44771").code,
        Some(0),
        "nothing listens before the first probe"
    );
    for _ in 0..3 {
        assert_eq!(sandbox.run(probe).code, Some(0));
    }
    // A process that already listens on the port keeps it.
    let mut other = server.create_sandbox();
    let listen = "python3 -c 'import socket; s = socket.create_server((\"127.0.0.1\", 44771)); print(\"on\", flush=True)
while True: c, _ = s.accept(); c.sendall(b\"mine\"); c.close()'";
    let listener = other.start_background(listen);
    e2e::eventually("it listens", || other.logs(&listener).contains("on"));
    assert_eq!(other.run(probe).code, Some(0));
    assert_eq!(other.run("cat </dev/tcp/127.0.0.1/44771").stdout, "mine");
}
