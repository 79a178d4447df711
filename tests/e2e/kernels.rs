//! Kernels that run inside: JavaScript and TypeScript with the image's node, and real Jupyter kernels,
//! through a real server.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Command;

use e2e::binary::ProgramCopies;
use e2e::sandbox::RemoteSandbox;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::{Value, json};

/// The events of a run: printed text, plain results, the name and text of its error.
#[derive(Debug, Default, PartialEq, Eq)]
struct RunEvents {
    stdout: String,
    stderr: String,
    results: Vec<Value>,
    error: Option<(String, String)>,
    count: Option<u64>,
}

impl RunEvents {
    fn add(&mut self, event: &Value) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        match event["type"].as_str() {
            Some("stdout") => self.stdout += &text(&event["text"]),
            Some("stderr") => self.stderr += &text(&event["text"]),
            Some("result") => self.results.push(event["results"].clone()),
            Some("error") => {
                self.error = Some((text(&event["error"]["ename"]), text(&event["error"]["evalue"])))
            }
            Some("execution_count") => self.count = event["execution_count"].as_u64(),
            _ => {}
        }
    }

    fn result(&self) -> &str {
        assert_eq!(self.results.len(), 1, "{self:?}");
        self.results[0]["text"].as_str().expect("a text")
    }

    fn error_name(&self) -> &str {
        self.error.as_ref().map_or("none", |(name, _)| name)
    }
}

fn open(sandbox: &mut RemoteSandbox, language: &str) -> String {
    let answer = sandbox.request_inside("POST", "code/context", &json!({"language": language}));
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["id"].as_str().expect("a text").to_owned()
}

fn events(text: &str) -> impl Iterator<Item = Value> {
    text.lines().filter_map(|line| serde_json::from_str(line).ok())
}

fn run(sandbox: &mut RemoteSandbox, context: &str, code: &str) -> RunEvents {
    let answer = sandbox.request_inside("POST", "code", &json!({"code": code, "context": {"id": context}}));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let mut reported = RunEvents::default();
    events(&answer.text()).for_each(|event| reported.add(&event));
    reported
}

/// Runs code, interrupts it once it has printed something, and returns all its events.
fn interrupted(sandbox: &mut RemoteSandbox, context: &str, code: &str) -> RunEvents {
    let body = json!({"code": code, "context": {"id": context}});
    let answer = sandbox.request_streaming("POST", "code", &body);
    let mut reported = RunEvents::default();
    for line in BufReader::new(answer.body).lines() {
        let line = line.expect("the stream continues");
        let before = reported.stdout.len();
        events(&line).for_each(|event| reported.add(&event));
        if before == 0 && !reported.stdout.is_empty() {
            let answer = sandbox.request_inside("DELETE", &format!("code?id={context}"), &json!({}));
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
    }
    reported
}

fn has_program(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", "command -v \"$0\" >/dev/null", program]).status();
    let found = found.is_ok_and(|status| status.success());
    if !found {
        testkit::skip_test(&format!("there is no {program} here"));
    }
    found
}

#[test]
fn javascript_keeps_state_and_reports_like_other_languages() {
    if !has_program("node") {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let context = open(&mut sandbox, "javascript");
    let reported =
        run(&mut sandbox, &context, "const a = 1; console.log('out'); console.error('err'); a + 1");
    assert_eq!(
        (reported.stdout.as_str(), reported.stderr.as_str(), reported.result()),
        ("out\n", "err\n", "2")
    );
    assert_eq!(reported.results[0]["text/plain"], "2");
    assert_eq!(reported.count, Some(1));
    let reported =
        run(&mut sandbox, &context, "const a = await Promise.resolve(5)\nfunction f() { return missing }\na");
    assert_eq!((reported.result(), reported.count), ("5", Some(2)));
    let reported = run(&mut sandbox, &context, "f()");
    assert_eq!(reported.error, Some(("ReferenceError".to_owned(), "missing is not defined".to_owned())));
    let reported = run(&mut sandbox, &context, "display.html`<b>${a}</b>`");
    assert_eq!(reported.results[0]["text/html"], "<b>5</b>");

    let other = open(&mut sandbox, "javascript");
    assert_eq!(run(&mut sandbox, &other, "typeof a").result(), "'undefined'");
    for code in [
        "console.log('spin'); for (;;) ;",
        "await null; console.log('spin'); for (;;) ;",
        "console.log('wait'); await new Promise(() => {})",
    ] {
        let reported = interrupted(&mut sandbox, &context, code);
        assert_eq!(reported.error_name(), "KeyboardInterrupt", "{code}: {reported:?}");
    }
    assert_eq!(run(&mut sandbox, &context, "a").result(), "5");
}

#[test]
fn a_script_that_ends_its_kernel_gets_a_new_one() {
    if !has_program("node") {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let context = open(&mut sandbox, "javascript");
    run(&mut sandbox, &context, "let kept = 1");
    for code in [
        "process.exit(3)",
        "process.kill(process.pid, 'SIGKILL')",
        "process.abort()",
        "process.kill(process.ppid, 'SIGKILL'); for (;;) ;",
    ] {
        let reported = run(&mut sandbox, &context, code);
        assert!(reported.error.is_some(), "{code}: {reported:?}");
        assert_eq!(run(&mut sandbox, &context, "typeof kept").result(), "'undefined'", "{code}");
    }
    // The dead kernels leave no process: node exits when its parent has gone.
    let gone = "until [ $(ps -eo comm= | grep -c '^node$') = 1 ]; do :; done";
    let ran = sandbox.run(&format!("timeout 30 sh -c \"{}\"", gone.replace('$', "\\$")));
    assert_eq!(ran.code, Some(0), "{ran:?}");
}

/// Code that writes into the kernel's own pipe only affects its own run.
#[test]
fn forged_kernel_reports_stay_in_their_run() {
    if !has_program("node") {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let context = open(&mut sandbox, "javascript");
    let lie = "const fs = require('fs'); for (let fd = 3; fd < 64; fd++) try { fs.writeSync(fd, 'done k1\\ntell x {\"result\":1}\\nready\\ngarbage\\n'.repeat(100)) } catch {} ; 7";
    let reported = run(&mut sandbox, &context, lie);
    assert!(reported.error.is_some() || reported.result() == "7", "{reported:?}");
    assert_eq!(run(&mut sandbox, &context, "1 + 1").result(), "2");
    let reported =
        run(&mut sandbox, &context, "for (let fd = 3; fd < 64; fd++) try { fs.closeSync(fd) } catch {}");
    assert!(reported.results.is_empty(), "{reported:?}");
    assert_eq!(run(&mut sandbox, &context, "2 + 2").result(), "4");
}

#[test]
fn typescript_is_javascript_without_its_types() {
    if !has_program("node") {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let context = open(&mut sandbox, "typescript");
    let reported = run(
        &mut sandbox,
        &context,
        "enum Color { Red, Green }\ninterface P { x: number }\nconst p: P = { x: Color.Green }\nconsole.log(`x is ${p.x}`)\np.x as number",
    );
    assert_eq!((reported.stdout.as_str(), reported.result()), ("x is 1\n", "1"));
    assert_eq!(run(&mut sandbox, &context, "const p: string = 'again'; p").result(), "'again'");
    assert_eq!(run(&mut sandbox, &context, "let = 1").error_name(), "SyntaxError");
    let reported = run(&mut sandbox, &context, "type Long = {\n  a: string\n}\nthrow new RangeError('here')");
    assert_eq!(reported.error, Some(("RangeError".to_owned(), "here".to_owned())));
}

/// The directory of `cargo xtask kernels`, if it contains the requested kernel.
fn kernels(name: &str) -> Option<PathBuf> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    let place = workspace.expect("the tests lie in it").join("target/kernels");
    let found = place.join("kernels").join(name).join("kernel.json").exists();
    if !found || !testkit::is_root() {
        testkit::skip_test(
            "it needs root, and a Jupyter kernel that `cargo xtask kernels` has put into target/kernels",
        );
        return None;
    }
    Some(place)
}

/// A sandbox that finds the kernels at `/opt/kernels`.
fn with_kernels(place: &Path) -> (TestServer, RemoteSandbox) {
    let place = place.to_str().expect("a test's own path");
    let server = ServerBuilder::new().env("CORACLE_VOLUMES_HOST_PATHS", place).start();
    let volume = json!({"name": "k", "mountPath": "/opt/kernels", "readOnly": true, "host": {"path": place}});
    let sandbox = server.create_sandbox_with(&json!({
        "volumes": [volume],
        "env": {"JUPYTER_PATH": "/opt/kernels"},
        "resourceLimits": {"cpu": "2", "memory": "2Gi"},
    }));
    (server, sandbox)
}

#[test]
fn a_jupyter_kernel_can_be_chosen_in_place_of_the_built_in_one() {
    let Some(place) = kernels("python3") else { return };
    let (_server, mut sandbox) = with_kernels(&place);
    let context = open(&mut sandbox, "jupyter:python3");
    let reported =
        run(&mut sandbox, &context, "import sys\nprint('out')\nprint('err', file=sys.stderr)\nx = 2 + 2\nx");
    assert_eq!(
        (reported.stdout.as_str(), reported.stderr.as_str(), reported.result()),
        ("out\n", "err\n", "4")
    );
    assert_eq!(reported.count, Some(1));
    assert_eq!(
        run(&mut sandbox, &context, "get_ipython().__class__.__name__").result(),
        "'ZMQInteractiveShell'"
    );
    let reported =
        run(&mut sandbox, &context, "from IPython.display import HTML\ndisplay(HTML('<b>x</b>'))\n1/0");
    assert_eq!(reported.results[0]["text/html"], "<b>x</b>");
    assert_eq!(reported.error_name(), "ZeroDivisionError");
    assert_eq!(run(&mut sandbox, &context, "input('?')").error_name(), "StdinNotImplementedError");
    assert_eq!(
        run(&mut sandbox, &context, "import os; os.system('echo from a child')").stdout,
        "from a child\n"
    );
    let reported = interrupted(&mut sandbox, &context, "print('begun', flush=True)\nwhile True: pass");
    assert_eq!(reported.error_name(), "KeyboardInterrupt", "{reported:?}");
    assert_eq!(run(&mut sandbox, &context, "x").result(), "4");
    let reported = run(&mut sandbox, &context, "os._exit(5)");
    assert!(reported.error.is_some(), "{reported:?}");
    assert_eq!(run(&mut sandbox, &context, "'x' in globals()").result(), "False");
    // Only its user can read the kernel's key, which is removed with the kernel.
    let ran = sandbox.run("ls -ld /tmp/coracle-kernel-* | cut -c1-10; find /tmp/coracle-kernel-* -name connection.json -printf '%m\\n'");
    assert_eq!(ran.stdout, "drwx------\n600\n", "{ran:?}");
}

#[test]
fn java_runs_in_its_jupyter_kernel() {
    let Some(place) = kernels("java").filter(|_| has_program("java")) else { return };
    let (_server, mut sandbox) = with_kernels(&place);
    let context = open(&mut sandbox, "java");
    let reported = run(&mut sandbox, &context, "int x = 40;\nSystem.out.println(\"out\");\nx + 2");
    assert_eq!((reported.stdout.as_str(), reported.result()), ("out\n", "42"));
    assert_eq!(run(&mut sandbox, &context, "int y = 1 / 0;").error_name(), "EvalException");
    let reported = interrupted(
        &mut sandbox,
        &context,
        "while (true) { System.out.println(\"begun\"); Thread.sleep(10); }",
    );
    assert_eq!(reported.error_name(), "EvaluationInterruptedException", "{reported:?}");
    assert_eq!(run(&mut sandbox, &context, "x").result(), "40");
}

#[test]
fn go_runs_in_its_jupyter_kernel() {
    let Some(place) = kernels("gonb").filter(|_| has_program("go")) else { return };
    let (_server, mut sandbox) = with_kernels(&place);
    let context = open(&mut sandbox, "go");
    let program = "package main\nimport \"fmt\"\nfunc main() {\n    fmt.Print(\"2 + 2 = \", 2 + 2)\n}";
    let reported = run(&mut sandbox, &context, program);
    assert_eq!((reported.stdout.as_str(), reported.error_name()), ("2 + 2 = 4", "none"), "{reported:?}");
    let reported = run(&mut sandbox, &context, "package main\nfunc main() { undeclared++ }");
    assert_ne!(reported.error_name(), "none", "{reported:?}");
}

#[test]
fn unavailable_language_is_refused_with_a_reason() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let answer = sandbox.request_inside("POST", "code/context", &json!({"language": "cobol"}));
    assert!(answer.status >= 400, "{}", answer.text());
    assert!(answer.text().contains("Jupyter kernel for cobol"), "{}", answer.text());
    let contexts = sandbox.request_inside("GET", "code/contexts", &json!({}));
    assert_eq!(contexts.json(), json!([]));
}

#[test]
fn doctor_lists_the_kernels_of_an_image() {
    if !testkit::needs_root() {
        return;
    }
    let state = tempfile::tempdir().expect("there is room");
    let doctor = |words: &[&str]| {
        let mut command = ProgramCopies::shared().command();
        command.args(["doctor", "--image", "host", "--state-dir"]).arg(state.path()).args(words);
        let ended = command.output().expect("it starts");
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        String::from_utf8(ended.stdout).expect("it is text")
    };
    let offer: Value = serde_json::from_str(&doctor(&["--json"])).expect("it is JSON");
    let languages: Vec<&str> = offer["languages"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|found| found["language"].as_str())
        .collect();
    assert!(languages.contains(&"bash"), "{offer}");
    assert!(offer["tools"]["sh"].is_string() && offer["jupyter"].is_array(), "{offer}");
    assert!(doctor(&[]).contains("INTERPRETER"));
}
