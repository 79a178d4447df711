//! Kernels that live inside: JavaScript and TypeScript with the image's node, and real Jupyter
//! kernels, through a real server.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Command;

use e2e::binary::Programs;
use e2e::sandbox::Sandbox;
use e2e::server::{Server, Start};
use serde_json::{Value, json};

/// What a run told: printed text, plain results, the name and text of its error.
#[derive(Debug, Default, PartialEq, Eq)]
struct Told {
    stdout: String,
    stderr: String,
    results: Vec<Value>,
    error: Option<(String, String)>,
    count: Option<u64>,
}

impl Told {
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

fn open(sandbox: &mut Sandbox, language: &str) -> String {
    let answer = sandbox.inside("POST", "code/context", &json!({"language": language}));
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["id"].as_str().expect("a text").to_owned()
}

fn events(text: &str) -> impl Iterator<Item = Value> {
    text.lines().filter_map(|line| serde_json::from_str(line).ok())
}

fn run(sandbox: &mut Sandbox, context: &str, code: &str) -> Told {
    let answer = sandbox.inside("POST", "code", &json!({"code": code, "context": {"id": context}}));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let mut told = Told::default();
    events(&answer.text()).for_each(|event| told.add(&event));
    told
}

/// Runs code, interrupts it when it has printed something, and returns all that was told.
fn interrupted(sandbox: &mut Sandbox, context: &str, code: &str) -> Told {
    let body = json!({"code": code, "context": {"id": context}});
    let answer = sandbox.inside_streaming("POST", "code", &body);
    let mut told = Told::default();
    for line in BufReader::new(answer.body).lines() {
        let line = line.expect("the server goes on");
        let before = told.stdout.len();
        events(&line).for_each(|event| told.add(&event));
        if before == 0 && !told.stdout.is_empty() {
            let answer = sandbox.inside("DELETE", &format!("code?id={context}"), &json!({}));
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
    }
    told
}

fn has(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", "command -v \"$0\" >/dev/null", program]).status();
    let found = found.is_ok_and(|status| status.success());
    if !found {
        testkit::skip(&format!("there is no {program} here"));
    }
    found
}

#[test]
fn javascript_keeps_its_state_and_tells_as_other_languages_do() {
    if !has("node") {
        return;
    }
    let server = Server::start();
    let mut sandbox = server.create();
    let context = open(&mut sandbox, "javascript");
    let told = run(&mut sandbox, &context, "const a = 1; console.log('out'); console.error('err'); a + 1");
    assert_eq!((told.stdout.as_str(), told.stderr.as_str(), told.result()), ("out\n", "err\n", "2"));
    assert_eq!(told.results[0]["text/plain"], "2");
    assert_eq!(told.count, Some(1));
    let told =
        run(&mut sandbox, &context, "const a = await Promise.resolve(5)\nfunction f() { return missing }\na");
    assert_eq!((told.result(), told.count), ("5", Some(2)));
    let told = run(&mut sandbox, &context, "f()");
    assert_eq!(told.error, Some(("ReferenceError".to_owned(), "missing is not defined".to_owned())));
    let told = run(&mut sandbox, &context, "display.html`<b>${a}</b>`");
    assert_eq!(told.results[0]["text/html"], "<b>5</b>");

    let other = open(&mut sandbox, "javascript");
    assert_eq!(run(&mut sandbox, &other, "typeof a").result(), "'undefined'");
    for code in [
        "console.log('spin'); for (;;) ;",
        "await null; console.log('spin'); for (;;) ;",
        "console.log('wait'); await new Promise(() => {})",
    ] {
        let told = interrupted(&mut sandbox, &context, code);
        assert_eq!(told.error_name(), "KeyboardInterrupt", "{code}: {told:?}");
    }
    assert_eq!(run(&mut sandbox, &context, "a").result(), "5");
}

#[test]
fn a_script_that_ends_its_kernel_gets_a_new_one() {
    if !has("node") {
        return;
    }
    let server = Server::start();
    let mut sandbox = server.create();
    let context = open(&mut sandbox, "javascript");
    run(&mut sandbox, &context, "let kept = 1");
    for code in [
        "process.exit(3)",
        "process.kill(process.pid, 'SIGKILL')",
        "process.abort()",
        "process.kill(process.ppid, 'SIGKILL'); for (;;) ;",
    ] {
        let told = run(&mut sandbox, &context, code);
        assert!(told.error.is_some(), "{code}: {told:?}");
        assert_eq!(run(&mut sandbox, &context, "typeof kept").result(), "'undefined'", "{code}");
    }
    // Of the dead ones nothing stays: node ends when it hears that whoever started it has gone.
    let gone = "until [ $(ps -eo comm= | grep -c '^node$') = 1 ]; do :; done";
    let ran = sandbox.run(&format!("timeout 30 sh -c \"{}\"", gone.replace('$', "\\$")));
    assert_eq!(ran.code, Some(0), "{ran:?}");
}

/// Whoever writes into the kernel's own pipe deceives himself alone.
#[test]
fn lies_in_the_pipe_of_reports_stay_in_their_run() {
    if !has("node") {
        return;
    }
    let server = Server::start();
    let mut sandbox = server.create();
    let context = open(&mut sandbox, "javascript");
    let lie = "const fs = require('fs'); for (let fd = 3; fd < 64; fd++) try { fs.writeSync(fd, 'done k1\\ntell x {\"result\":1}\\nready\\ngarbage\\n'.repeat(100)) } catch {} ; 7";
    let told = run(&mut sandbox, &context, lie);
    assert!(told.error.is_some() || told.result() == "7", "{told:?}");
    assert_eq!(run(&mut sandbox, &context, "1 + 1").result(), "2");
    let told =
        run(&mut sandbox, &context, "for (let fd = 3; fd < 64; fd++) try { fs.closeSync(fd) } catch {}");
    assert!(told.results.is_empty(), "{told:?}");
    assert_eq!(run(&mut sandbox, &context, "2 + 2").result(), "4");
}

#[test]
fn typescript_is_javascript_without_its_types() {
    if !has("node") {
        return;
    }
    let server = Server::start();
    let mut sandbox = server.create();
    let context = open(&mut sandbox, "typescript");
    let told = run(
        &mut sandbox,
        &context,
        "enum Color { Red, Green }\ninterface P { x: number }\nconst p: P = { x: Color.Green }\nconsole.log(`x is ${p.x}`)\np.x as number",
    );
    assert_eq!((told.stdout.as_str(), told.result()), ("x is 1\n", "1"));
    assert_eq!(run(&mut sandbox, &context, "const p: string = 'again'; p").result(), "'again'");
    assert_eq!(run(&mut sandbox, &context, "let = 1").error_name(), "SyntaxError");
    let told = run(&mut sandbox, &context, "type Long = {\n  a: string\n}\nthrow new RangeError('here')");
    assert_eq!(told.error, Some(("RangeError".to_owned(), "here".to_owned())));
}

/// Where `cargo xtask kernels` puts kernels, if the one that is wanted is there.
fn kernels(name: &str) -> Option<PathBuf> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    let place = workspace.expect("the tests lie in it").join("target/kernels");
    let found = place.join("kernels").join(name).join("kernel.json").exists();
    if !found || !testkit::is_root() {
        testkit::skip(
            "it needs root, and a Jupyter kernel that `cargo xtask kernels` has put into target/kernels",
        );
        return None;
    }
    Some(place)
}

/// A sandbox that finds the kernels at `/opt/kernels`.
fn with_kernels(place: &Path) -> (Server, Sandbox) {
    let place = place.to_str().expect("a test's own path");
    let server = Start::new().env("CORACLE_VOLUMES_HOST_PATHS", place).start();
    let volume = json!({"name": "k", "mountPath": "/opt/kernels", "readOnly": true, "host": {"path": place}});
    let sandbox = server.create_with(&json!({
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
    let told =
        run(&mut sandbox, &context, "import sys\nprint('out')\nprint('err', file=sys.stderr)\nx = 2 + 2\nx");
    assert_eq!((told.stdout.as_str(), told.stderr.as_str(), told.result()), ("out\n", "err\n", "4"));
    assert_eq!(told.count, Some(1));
    assert_eq!(
        run(&mut sandbox, &context, "get_ipython().__class__.__name__").result(),
        "'ZMQInteractiveShell'"
    );
    let told =
        run(&mut sandbox, &context, "from IPython.display import HTML\ndisplay(HTML('<b>x</b>'))\n1/0");
    assert_eq!(told.results[0]["text/html"], "<b>x</b>");
    assert_eq!(told.error_name(), "ZeroDivisionError");
    assert_eq!(run(&mut sandbox, &context, "input('?')").error_name(), "StdinNotImplementedError");
    assert_eq!(
        run(&mut sandbox, &context, "import os; os.system('echo from a child')").stdout,
        "from a child\n"
    );
    let told = interrupted(&mut sandbox, &context, "print('begun', flush=True)\nwhile True: pass");
    assert_eq!(told.error_name(), "KeyboardInterrupt", "{told:?}");
    assert_eq!(run(&mut sandbox, &context, "x").result(), "4");
    let told = run(&mut sandbox, &context, "os._exit(5)");
    assert!(told.error.is_some(), "{told:?}");
    assert_eq!(run(&mut sandbox, &context, "'x' in globals()").result(), "False");
    // The key to the kernel is for its user alone, and goes with it.
    let ran = sandbox.run("ls -ld /tmp/coracle-kernel-* | cut -c1-10; find /tmp/coracle-kernel-* -name connection.json -printf '%m\\n'");
    assert_eq!(ran.stdout, "drwx------\n600\n", "{ran:?}");
}

#[test]
fn java_runs_in_its_jupyter_kernel() {
    let Some(place) = kernels("java").filter(|_| has("java")) else { return };
    let (_server, mut sandbox) = with_kernels(&place);
    let context = open(&mut sandbox, "java");
    let told = run(&mut sandbox, &context, "int x = 40;\nSystem.out.println(\"out\");\nx + 2");
    assert_eq!((told.stdout.as_str(), told.result()), ("out\n", "42"));
    assert_eq!(run(&mut sandbox, &context, "int y = 1 / 0;").error_name(), "EvalException");
    let told = interrupted(
        &mut sandbox,
        &context,
        "while (true) { System.out.println(\"begun\"); Thread.sleep(10); }",
    );
    assert_eq!(told.error_name(), "EvaluationInterruptedException", "{told:?}");
    assert_eq!(run(&mut sandbox, &context, "x").result(), "40");
}

#[test]
fn go_runs_in_its_jupyter_kernel() {
    let Some(place) = kernels("gonb").filter(|_| has("go")) else { return };
    let (_server, mut sandbox) = with_kernels(&place);
    let context = open(&mut sandbox, "go");
    let program = "package main\nimport \"fmt\"\nfunc main() {\n    fmt.Print(\"2 + 2 = \", 2 + 2)\n}";
    let told = run(&mut sandbox, &context, program);
    assert_eq!((told.stdout.as_str(), told.error_name()), ("2 + 2 = 4", "none"), "{told:?}");
    let told = run(&mut sandbox, &context, "package main\nfunc main() { undeclared++ }");
    assert_ne!(told.error_name(), "none", "{told:?}");
}

#[test]
fn a_language_that_the_image_has_not_is_refused_with_the_reason() {
    let server = Server::start();
    let mut sandbox = server.create();
    let answer = sandbox.inside("POST", "code/context", &json!({"language": "cobol"}));
    assert!(answer.status >= 400, "{}", answer.text());
    assert!(answer.text().contains("Jupyter kernel for cobol"), "{}", answer.text());
    let contexts = sandbox.inside("GET", "code/contexts", &json!({}));
    assert_eq!(contexts.json(), json!([]));
}

#[test]
fn doctor_says_what_an_image_offers() {
    if !testkit::needs_root() {
        return;
    }
    let state = tempfile::tempdir().expect("there is room");
    let doctor = |words: &[&str]| {
        let mut command = Programs::shared().command();
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
