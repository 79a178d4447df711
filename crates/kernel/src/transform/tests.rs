//! Expected scripts for cells, as tables; other tests run them in node.

use proptest::prelude::*;

use super::*;

fn javascript(code: &str) -> String {
    prepare_script(code, ScriptLanguage::JavaScript)
        .unwrap_or_else(|refused| panic!("{code}: {refused:?}"))
        .code
}

fn typescript(code: &str) -> String {
    prepare_script(code, ScriptLanguage::TypeScript)
        .unwrap_or_else(|refused| panic!("{code}: {refused:?}"))
        .code
}

#[test]
fn declarations_become_assignments() {
    for (code, script) in [
        ("const a = 1", "var a;\n(() => {;void (a = 1);\n})()"),
        ("let a", "var a;\n(() => {;void (a = void 0);\n})()"),
        ("var a", "var a;\n(() => {;void (a);\n})()"),
        ("let a = 1, b;", "var a, b;\n(() => {;void (a = 1, b = void 0);\n})()"),
        ("let {a, b: [c = 2, ...d]} = e", "var a, c, d;\n(() => {;void ({a, b: [c = 2, ...d]} = e);\n})()"),
        ("f\nlet a = 1", "var a;\n(() => {f\n;void (a = 1);\n})()"),
        ("class A {}", "var A;\n(() => {;A = class A {};\n})()"),
        ("export const a = 1", "var a;\n(() => {;void (a = 1);\n})()"),
        ("if (x) var a = 1; else b()", "var a;\n(() => {if (x) void (a = 1); else b()\n})()"),
        ("for (var i = 0;;) {}", "var i;\n(() => {for (i = 0;;) {}\n})()"),
        ("for (var k in o) ;", "var k;\n(() => {for (k in o) ;\n})()"),
        ("for (let i = 0;;) {}", "(() => {for (let i = 0;;) {}\n})()"),
        ("{ let inner = 1 }", "(() => {{ let inner = 1 }\n})()"),
        ("() => { var own }", "(() => {return (() => { var own })\n})()"),
    ] {
        assert_eq!(javascript(code), script, "{code}");
    }
}

#[test]
fn functions_go_to_the_front() {
    for (code, script) in [
        ("f(); function f() {}", "function f() {}\n(() => {return (f());  \n})()"),
        ("export default function f() {}", "function f() {}\n(() => {; \n})()"),
        ("async function* g() {}\n1", "async function* g() {}\n(() => { \nreturn (1)\n})()"),
        (
            "function f() { while (x) y() }",
            "function f() { while (x) {__coracle.check();y()} }\n(() => { \n})()",
        ),
        // Text that ends right before a function stays in place.
        (
            "await 0; while (x) y();function f() {}",
            "function f() {}\n(async () => {await 0; while (x) {__coracle.check();y();} \n})()",
        ),
    ] {
        assert_eq!(javascript(code), script, "{code}");
    }
}

#[test]
fn last_expression_is_returned() {
    for (code, script) in [
        ("1;", "(() => {return (1);\n})()"),
        ("1 // why", "(() => {return (1) // why\n})()"),
        ("a;;;", "(() => {return (a);;;\n})()"),
        ("'text'", "(() => {return ('text')\n})()"),
        ("'use strict'; a", "(() => {'use strict'; return (a)\n})()"),
        ("{ a: 1 }", "(() => {return (({ a: 1 }\n))\n})()"),
        ("{ a: 1 };", "(() => {{ a: 1 };\n})()"),
        ("await a", "(async () => {return (await a)\n})()"),
        ("async () => await a", "(() => {return (async () => await a)\n})()"),
        ("export default 1", "(() => {;return (1);\n})()"),
        ("", "(() => {\n})()"),
    ] {
        assert_eq!(javascript(code), script, "{code}");
    }
}

#[test]
fn imports_load_modules() {
    for (code, script) in [
        ("import 'm'", "(async () => {;(await __coracle.module(\"m\", [], {}));\n})()"),
        (
            "import a, {b as c} from 'm'",
            "var a, c;\n(async () => {;({\"default\": a, \"b\": c} = await __coracle.module(\"m\", [\"default\",\"b\"], {}));\n})()",
        ),
        (
            "import * as n from 'm'",
            "var n;\n(async () => {;((n = await __coracle.module(\"m\", [], {})));\n})()",
        ),
        (
            "import d, * as n from 'm' with {type: 'json'}",
            "var d, n;\n(async () => {;({\"default\": d} = (n = await __coracle.module(\"m\", [\"default\"], {\"type\":\"json\"})));\n})()",
        ),
        ("import('m')", "(() => {return (__coracle.load('m'))\n})()"),
        ("import.meta.url", "(() => {return (__coracle.meta.url)\n})()"),
        ("export * from 'm'; export {x} from 'n'", "(() => {; ;\n})()"),
    ] {
        assert_eq!(javascript(code), script, "{code}");
    }
}

#[test]
fn loops_check_for_interrupts_where_no_signal_ends_them() {
    for (code, script) in [
        ("while (1) ;", "(() => {while (1) ;\n})()"),
        ("await 0; do x; while (1)", "(async () => {await 0; do {__coracle.check();x;} while (1)\n})()"),
        (
            "for await (const a of b) for (;;) {}",
            "(async () => {for await (const a of b) {__coracle.check();for (;;) {__coracle.check();}}\n})()",
        ),
    ] {
        assert_eq!(javascript(code), script, "{code}");
    }
}

#[test]
fn types_are_removed() {
    for (code, script) in [
        ("const a: number = 1", "var a;\n(() => {;void (a = 1);\n\n})()"),
        ("interface I {}\ntype T = I", "(() => {\n})()"),
        ("import type { T } from 'm'", "(() => {;\n\n})()"),
        ("a as any", "(() => {return (a);\n\n})()"),
        ("function f(): void", "(() => {\n})()"),
    ] {
        let made = typescript(code);
        assert_eq!(made.replace(" ", ""), script.replace(" ", ""), "{code}");
    }
    assert!(typescript("enum E { A }").contains("void (E = "));
    assert!(typescript("namespace N { export const x = 1 }").contains("N = "));
    assert!(typescript("class A { constructor(private x: number) {} }").contains("this.x = x"));
    assert!(typescript("@d class A {}").contains("babelHelpers.decorate("));
}

#[test]
fn syntax_errors_are_reported_with_their_position() {
    for (code, place) in [
        ("let x = = 2", "cell:1:9"),
        ("ok\n  let 1", "cell:2:"),
        ("return 1", "cell:1:1"),
        ("let a; let a", "cell:1:"),
        ("break", "cell:1:1"),
        ("function f() { await 1 }", "cell:1:"),
        ("'unclosed", "cell:1:1"),
    ] {
        for language in [ScriptLanguage::JavaScript, ScriptLanguage::TypeScript] {
            let refused = prepare_script(code, language).expect_err(code);
            assert!(refused.traceback[0].starts_with(place), "{code}: {refused:?}");
        }
    }
    let deep = "[".repeat(5000);
    assert!(prepare_script(&deep, ScriptLanguage::JavaScript).is_err());
}

/// Fragments that combine in unexpected ways.
const CELL_PIECES: &[&str] = &[
    "let a = 1",
    "const {b, c = 2} = x",
    "var d",
    "function f() {}",
    "class A { static { var s } }",
    "await x",
    "for (var i of y) ",
    "for (;;) ",
    "while (z) ",
    "do ",
    " while (q)",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    ";",
    "\n",
    ",",
    "return",
    "import e from 'm'",
    "export ",
    "export default ",
    "import('n')",
    "import.meta",
    "async () => ",
    "if (1) ",
    "else ",
    "label: ",
    "`${",
    "}`",
    "'s'",
    "/re/g",
    "// c\n",
    "/* c */",
    "#!x",
    "enum E { A }",
    "type T = 1",
    "namespace N {}",
    ": number",
    "as any",
    "<T>",
    "@dec ",
    "ß",
    "😀",
    "\u{2028}",
    "0",
    "1n",
    "=> ",
    "= ",
    "...",
    "?.",
    "using u = v",
    "yield",
    "static",
    "declare ",
    "abstract ",
    "\\u0061",
    "\r\n",
    "\t",
    "switch (1) { case 1: var w }",
    "try {} catch {}",
];

fn any_cell() -> impl Strategy<Value = String> {
    prop::collection::vec(prop::sample::select(CELL_PIECES), 0..12).prop_flat_map(|pieces| {
        // With one per line, more combinations are valid.
        prop::sample::select(&[" ", "\n", ";\n"][..]).prop_map(move |between| pieces.join(between))
    })
}

proptest! {
    /// Every accepted cell becomes a valid script.
    #[test]
    fn accepted_cells_become_valid_scripts(code in any_cell()) {
        for language in [ScriptLanguage::JavaScript, ScriptLanguage::TypeScript] {
            if let Ok(script) = prepare_script(&code, language) {
                let allocator = Allocator::default();
                let again = parse::parse_cell(&allocator, &script.code, SourceType::cjs());
                prop_assert!(again.is_ok(), "{code:?} became {:?}: {:?}", script.code, again.err());
            }
        }
    }

    #[test]
    fn no_text_causes_a_panic(code in "\\PC{0,80}") {
        for language in [ScriptLanguage::JavaScript, ScriptLanguage::TypeScript] {
            drop(prepare_script(&code, language));
        }
    }
}
