//! JavaScript and TypeScript, run by node.

use crate::harness::{KernelProcess, has_program};

fn javascript() -> KernelProcess {
    KernelProcess::start_ready(&["javascript"], &[])
}

fn typescript() -> KernelProcess {
    KernelProcess::start_ready(&["typescript"], &[])
}

#[test]
fn results_are_last_expressions() {
    if !has_program("node") {
        return;
    }
    let mut kernel = javascript();
    for (code, result) in [
        ("1 + 1", "2"),
        ("1 + 1;", "2"),
        ("'use strict'", "'use strict'"),
        ("let a = 1\n;[1, a]", "[ 1, 1 ]"),
        ("{ a: 1, b: [2] }", "{ a: 1, b: [ 2 ] }"),
        ("(1, 2) // why", "2"),
        ("await Promise.resolve(4)", "4"),
        ("x = 5", "5"),
        ("null", "null"),
        ("function f() {}; f", "[Function: f]"),
        ("const arrow = () => 1; arrow", "[Function: arrow]"),
        ("`a\nb`", "'a\\nb'"),
        ("this === globalThis", "true"),
        ("(function () { return typeof this })()", "'object'"),
        ("export default 7", "7"),
        ("#!/usr/bin/env node\n8", "8"),
        ("for (var i = 0; i < 3; i++) {}\ni", "3"),
        ("for (var {p} of [{p: 9}]) ;\np", "9"),
        ("if (true) { var deep = 1 }\ndeep", "1"),
        ("let q = 1, {r, s: [t]} = {r: 2, s: [3]};\n[q, r, t]", "[ 1, 2, 3 ]"),
        ("with ({ w: 1 }) { var out = w }\nout", "1"),
        ("new Map([[1, {a: 2}]])", "Map(1) { 1 => { a: 2 } }"),
    ] {
        assert_eq!(kernel.run(code).text(), result, "{code}");
    }
    for code in ["", ";", "// nothing", "let u", "if (1) 2", "undefined", "function g() {}", "class C {}"] {
        let received = kernel.run(code);
        assert!(received.results.is_empty() && received.errors.is_empty(), "{code}: {received:?}");
    }
}

#[test]
fn cells_are_counted_and_see_each_other() {
    if !has_program("node") {
        return;
    }
    let mut kernel = javascript();
    assert_eq!(
        kernel.run("const a = 1; let b = 2; var c = 3; class D { x = 4 }; function e() { return b }").count,
        Some(1)
    );
    assert_eq!(kernel.run("[a, b, c, new D().x, e()]").text(), "[ 1, 2, 3, 4, 2 ]");
    // All of them may be declared again, and functions see later declarations.
    kernel.run("const a = 10; let b = 20; var c; class D { x = 40 }");
    assert_eq!(kernel.run("[a, b, c, new D().x, e()]").text(), "[ 10, 20, 3, 40, 20 ]");
    kernel.run("function first() { return second() } function second() { return 1 }");
    kernel.run("function second() { return 2 }");
    assert_eq!(kernel.run("first()").text(), "2");
    assert_eq!(
        kernel.run("hoisted()\nfunction hoisted() { return 'early' }").results[0]["text/plain"],
        "'early'"
    );
}

/// Read-only globals of node can be declared too.
#[test]
fn globals_of_node_can_be_declared() {
    if !has_program("node") {
        return;
    }
    let mut kernel = javascript();
    for name in ["crypto", "fetch", "performance", "navigator", "fs", "process2", "global2", "URL"] {
        let received = kernel.run(&format!("const {name} = '{name}'; {name}"));
        assert_eq!(received.text(), format!("'{name}'"), "{name}");
    }
}

#[test]
fn modules_are_found_by_every_form_of_import() {
    if !has_program("node") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("own.mjs"), "export const n = 5; export default 'd'").unwrap();
    std::fs::write(directory.path().join("data.json"), "{\"k\": [1]}").unwrap();
    let package = directory.path().join("node_modules/pack");
    std::fs::create_dir_all(&package).unwrap();
    std::fs::write(package.join("index.js"), "module.exports = { m: 'pack' }").unwrap();
    let mut kernel = javascript();
    kernel.run(&format!("process.chdir({:?})", directory.path()));
    for (code, result) in [
        ("import d, { n as five } from './own.mjs'\n[d, five]", "[ 'd', 5 ]"),
        ("import * as own from './own.mjs'; own.n", "5"),
        ("import 'node:fs'; 1", "1"),
        ("import { readFileSync } from 'fs'; typeof readFileSync", "'function'"),
        ("(await import('./own.mjs')).n", "5"),
        ("import pack from './node_modules/pack/index.js'; pack.m", "'pack'"),
        ("require('node:path').basename('/a/b')", "'b'"),
        ("typeof import.meta.url", "'string'"),
        ("import table from './data.json' with { type: 'json' }; table.k", "[ 1 ]"),
    ] {
        assert_eq!(kernel.run(code).text(), result, "{code}");
    }
    let received = kernel.run("import { nothing } from './own.mjs'");
    assert_eq!(received.error().0, "SyntaxError");
    assert_eq!(kernel.run("[d, five]").text(), "[ 'd', 5 ]");
}

#[test]
fn types_are_removed() {
    if !has_program("node") {
        return;
    }
    let mut kernel = typescript();
    for (code, result) in [
        ("const n: number = 1; n as unknown as string", "1"),
        ("interface P { x: number }\ntype Q = P | null\nconst p: P = { x: 1 } satisfies P\np", "{ x: 1 }"),
        ("enum Color { Red, Green = 5, Blue }\nColor.Blue", "6"),
        ("Color[5]", "'Green'"),
        ("const enum Flag { A = 1 << 2 }\nFlag.A", "4"),
        ("namespace Deep.Inner { export const v = 3 }\nDeep.Inner.v", "3"),
        (
            "class Pt { constructor(public x: number, private readonly y = 2) {} }\nnew Pt(1)",
            "Pt { x: 1, y: 2 }",
        ),
        (
            "abstract class Shape { abstract area(): number }\nclass Sq extends Shape { area() { return 4 } }\nnew Sq().area()",
            "4",
        ),
        ("function id<T>(value: T): T { return value }\nid<string>('s')", "'s'"),
        ("function over(a: string): void\nfunction over(a: any) { return a }\nover(1)", "1"),
        (
            "let later!: string; declare const outside: number; type X = typeof outside; [later]",
            "[ undefined ]",
        ),
        (
            "import type { Stats } from 'fs'\nimport { readFileSync, type PathLike } from 'fs'\ntypeof readFileSync",
            "'function'",
        ),
        ("import fs = require('fs')\ntypeof fs.readFileSync", "'function'"),
        ("const g = <T,>(x: T) => x; g(2)!", "2"),
        ("function sealed(c: any) { c.sealed = true }\n@sealed class K {}\n(K as any).sealed", "true"),
        ("await Promise.resolve<number>(3)", "3"),
        ("readFileSync === fs.readFileSync", "true"),
        ("{ a: 1 as const }", "{ a: 1 }"),
    ] {
        assert_eq!(kernel.run(code).text(), result, "{code}");
    }
    assert_eq!(kernel.run("let = :").error().0, "SyntaxError");
}

#[test]
fn errors_name_the_lines_of_their_cells() {
    if !has_program("node") {
        return;
    }
    let mut kernel = javascript();
    let received = kernel.run("const before = 1\n\nfunction fail() {\n  throw new TypeError('no')\n}");
    assert!(received.errors.is_empty());
    let received = kernel.run("// call it\nfail()");
    assert_eq!(received.error(), ("TypeError", "no"));
    let trace = received.traceback();
    assert!(trace.contains("cell[1]:4:9"), "{trace}");
    assert!(trace.contains("cell[2]:2:1"), "{trace}");
    assert!(trace.contains("  throw new TypeError('no')\n        ^"), "{trace}");
    assert!(!trace.contains("[eval]") && !trace.contains("node:vm"), "{trace}");

    let received = kernel.run("await 1\nmissing + 1");
    assert_eq!(received.error(), ("ReferenceError", "missing is not defined"));
    assert!(received.traceback().contains("cell[3]:2:1"), "{}", received.traceback());

    let received = kernel.run("let ok = 1\nlet x = = 2");
    assert_eq!(received.error().0, "SyntaxError");
    assert!(received.traceback().contains("cell:2:9"), "{}", received.traceback());

    assert_eq!(kernel.run("throw 'text'").error(), ("Uncaught", "'text'"));
    assert_eq!(kernel.run("throw null").error(), ("Uncaught", "null"));
    let received = kernel.run("throw new Error('outer', { cause: new Error('inner') })");
    assert!(received.traceback().contains("inner"), "{}", received.traceback());

    let mut kernel = typescript();
    let received = kernel.run("interface Long {\n  a: number\n}\nenum E { A }\nconst f = (x: Long): number => {\n  throw new RangeError('ts')\n}\nf({ a: 1 })");
    assert_eq!(received.error(), ("RangeError", "ts"));
    assert!(received.traceback().contains("cell[1]:6:"), "{}", received.traceback());
    assert!(received.traceback().contains("cell[1]:8:"), "{}", received.traceback());
}

#[test]
fn values_choose_their_representations() {
    if !has_program("node") {
        return;
    }
    let mut kernel = javascript();
    let received = kernel.run("({ [Symbol.for('Jupyter.display')]() { return { 'text/html': '<b>1</b>', 'application/json': { a: 1 } } } })");
    assert_eq!(received.results[0]["text/html"], "<b>1</b>");
    assert_eq!(received.results[0]["application/json"], "{\"a\":1}");
    let received = kernel.run("await display(display.html`<i>${1 + 1}</i>`); await display({ 'image/png': Buffer.from([1, 2]) }, { raw: true }); 3");
    assert_eq!(received.displays[0]["text/html"], "<i>2</i>");
    assert_eq!(received.displays[1]["image/png"], "AQI=");
    assert_eq!(received.text(), "3");
    assert_eq!(kernel.run("display.svg('<svg/>')").results[0]["image/svg+xml"], "<svg/>");
    assert_eq!(kernel.run("display.json({ a: 1 })").results[0]["application/json"], "{\"a\":1}");
    let received = kernel
        .run("new Proxy({}, { get() { throw new Error('trap') }, ownKeys() { throw new Error('trap') } })");
    assert_eq!(received.results.len() + received.errors.len(), 1, "{received:?}");
    let received = kernel.run("display.html('x'.repeat(9 << 20))");
    assert!(received.text().contains("too large"), "{}", received.text());
    assert_eq!(kernel.run("1").text(), "1");
}

#[test]
fn output_arrives_while_the_cell_runs() {
    if !has_program("node") {
        return;
    }
    let mut kernel = javascript();
    let key = kernel
        .begin_run("console.log('begun'); process.stderr.write('and so\\n'); await new Promise(() => {})");
    kernel.wait_for("begun\nand so\n");
    kernel.interrupt();
    assert_eq!(kernel.finish_run(&key).error().0, "KeyboardInterrupt");
    assert_eq!(kernel.run("1").text(), "1");
}

#[test]
fn loops_are_interrupted_everywhere() {
    if !has_program("node") {
        return;
    }
    let mut kernel = javascript();
    kernel.run(
        "let kept = 'kept'; async function spin() { await null; console.log('asleep'); while (true) ; }",
    );
    for code in [
        "console.log('in a loop'); while (true) {}",
        "await null; console.log('in a loop'); for (;;) {}",
        "console.log('in a loop'); while (true) await null",
        "console.log('in a loop'); await spin()",
        "await new Promise((go) => setTimeout(go, 1)); console.log('in a loop'); do kept; while (true)",
        "console.log('in a loop'); JSON.stringify({ toJSON() { for (;;) ; } })",
        "console.log('in a loop'); [1].map(() => { try { for (;;) ; } catch { } }); for (;;) ;",
    ] {
        let key = kernel.begin_run(code);
        kernel.wait_for("in a loop");
        kernel.interrupt();
        assert_eq!(kernel.finish_run(&key).error().0, "KeyboardInterrupt", "{code}");
        assert_eq!(kernel.run("kept").text(), "'kept'", "{code}");
        kernel.discard_output();
    }
}

/// V8 stops a cell between any two instructions, also inside node's own stream code.
#[test]
fn output_continues_after_an_interrupt_during_a_write() {
    if !has_program("node") {
        return;
    }
    let mut kernel = javascript();
    for round in 0..30 {
        let stream = ["stdout", "stderr"][round % 2];
        let key = kernel.begin_run(&format!("for (;;) process.{stream}.write('again and again\\n')"));
        kernel.wait_for("again and again");
        kernel.interrupt();
        assert_eq!(kernel.finish_run(&key).error().0, "KeyboardInterrupt");
        kernel.run(&format!("process.{stream}.write('end of round {round}')"));
        kernel.wait_for(&format!("end of round {round}"));
        kernel.discard_output();
    }
}

/// A cell that waits for a program ends when the program does.
#[test]
fn programs_of_a_cell_are_interrupted_too() {
    if !has_program("node") {
        return;
    }
    let mut kernel = javascript();
    let key = kernel.begin_run(
        "require('child_process').execSync('echo asleep >&2; exec sleep 1000', { stdio: 'inherit' })",
    );
    kernel.wait_for("asleep");
    kernel.interrupt();
    let received = kernel.finish_run(&key);
    assert_eq!(received.errors.len(), 1, "{received:?}");
    assert_eq!(kernel.run("1").text(), "1");
}

#[test]
fn interrupt_at_any_moment_ends_one_run() {
    if !has_program("node") {
        return;
    }
    let mut kernel = javascript();
    for round in 0..200 {
        let code = [
            "for (let i = 0; i < 20000; i++) ;",
            "await null; for (let i = 0; i < 20000; i++) ;",
            "await new Promise((go) => setTimeout(go, 1))",
        ];
        let key = kernel.begin_run(code[round % code.len()]);
        if round % 7 > 3 {
            assert!(kernel.next_report().unwrap().contains("count"));
        }
        kernel.interrupt();
        let received = kernel.finish_run(&key);
        assert!(received.errors.iter().all(|error| error["ename"] == "KeyboardInterrupt"), "{received:?}");
    }
    // The last interrupt may still be pending.
    kernel.run("0");
    assert_eq!(kernel.run("1").text(), "1");
}

#[test]
fn interrupt_before_the_cell_begins_ends_it() {
    if !has_program("node") {
        return;
    }
    let mut kernel = javascript();
    for code in ["for (;;) ;", "await null; for (;;) ;", "await new Promise(() => {})"].repeat(20) {
        let key = kernel.begin_run(code);
        kernel.interrupt();
        assert_eq!(kernel.finish_run(&key).error().0, "KeyboardInterrupt", "{code}");
    }
    // An interrupt without a running cell affects at most one: the next, or the one behind it if node handles the signal
    // only then.
    kernel.interrupt();
    let interrupted = (0..2).filter(|_| !kernel.run("0").errors.is_empty()).count();
    assert!(interrupted <= 1);
    assert_eq!(kernel.run("1").text(), "1");
}

/// No caller waits for it, so it can only be printed; the kernel keeps running.
#[test]
fn later_failures_are_printed() {
    if !has_program("node") {
        return;
    }
    let mut kernel = javascript();
    kernel
        .run("setTimeout(() => { throw new Error('too late') }, 1); Promise.reject(new Error('unheard')); 0");
    kernel.wait_for("Uncaught");
    kernel.wait_for("too late");
    kernel.wait_for("unheard");
    assert_eq!(kernel.run("2").text(), "2");
}

#[test]
fn reading_input_fails_with_an_error() {
    if !has_program("node") {
        return;
    }
    let mut kernel = javascript();
    for code in [
        "require('readline').createInterface({ input: process.stdin }).question('?', () => {})",
        "import * as rl from 'readline/promises'; await rl.createInterface({ input: process.stdin }).question('?')",
        "for await (const piece of process.stdin) ;",
        "process.stdin.on('data', () => {})",
    ] {
        let received = kernel.run(code);
        assert!(received.error().1.contains("cannot ask for input"), "{code}: {received:?}");
    }
    assert_eq!(kernel.run("require('fs').readFileSync(0, 'utf8')").text(), "''");
}

#[test]
fn kernel_ends_with_node() {
    if !has_program("node") {
        return;
    }
    let mut kernel = javascript();
    kernel.begin_run("process.exit(7)");
    assert_eq!(kernel.wait_for_exit().code(), Some(7));
    let mut kernel = javascript();
    kernel.begin_run("process.kill(process.pid, 'SIGKILL')");
    assert_eq!(kernel.wait_for_exit().code(), Some(137));
}

#[test]
fn end_of_orders_ends_node_even_when_busy() {
    if !has_program("node") {
        return;
    }
    let mut kernel = javascript();
    kernel.begin_run("console.log('busy'); while (true) {}");
    kernel.wait_for("busy");
    kernel.close_orders();
    assert!(kernel.wait_for_exit().success());
}

#[test]
fn children_inherit_no_private_descriptor() {
    if !has_program("node") {
        return;
    }
    let mut kernel = javascript();
    let received = kernel.run("require('child_process').execSync('ls /proc/self/fd', { encoding: 'utf8' }).trim().split('\\n').map(Number).filter((fd) => fd > 3 && fd < 100)");
    // Higher numbers may be inherited from the test runner.
    assert_eq!(received.text(), "[]");
}

#[test]
fn missing_node_is_reported_in_one_line() {
    let mut kernel = KernelProcess::start(&["javascript"], &[("PATH", "/nowhere")]);
    assert_eq!(kernel.wait_for_exit().code(), Some(127));
    kernel.wait_for("there is no `node` in this image");
}

#[test]
fn invalid_orders_are_skipped() {
    if !has_program("node") {
        return;
    }
    let mut kernel = javascript();
    kernel.send_order("\nrun\nrun BAD {\"code\":\"1\"}\nrun k {\"code\":1}\nnonsense\n");
    assert_eq!(kernel.run("3").text(), "3");
    let deep = format!("{}1{}", "(".repeat(100_000), ")".repeat(100_000));
    assert_eq!(kernel.run(&deep).error().0, "SyntaxError");
    let long = format!("'{}'.length", "x".repeat(2 << 20));
    assert_eq!(kernel.run(&long).text(), (2 << 20).to_string());
}
