//! Finds the edits that let the next cell use the declarations of this one.
//!
//! ```text
//! const a = 1              ;void (a = 1);            with `var a` at the beginning
//! class A {}               ;A = class A {};          likewise
//! function f() {}          moved to the beginning, where it declares itself
//! import b from "m"        ;({default: b} = await __coracle.module("m", ["default"]));
//! last + expression        return (last + expression)
//! while (x) {              while (x) {__coracle.check();   where SIGINT cannot end the loop
//! ```
//! Top-level names of a cell thus become properties of the global object: the next cell sees them,
//! and may declare them again. The price is that `const` can be assigned to.

use std::collections::{BTreeSet, HashSet};

use oxc_ast::ast::{
    ArrowFunctionExpression, AwaitExpression, Class, Declaration, DoWhileStatement, ExportDefaultDeclaration,
    ExportDefaultDeclarationKind, ExportNamedDeclaration, Expression, ForInStatement, ForOfStatement,
    ForStatement, ForStatementInit, ForStatementLeft, Function, ImportDeclaration, ImportExpression,
    MetaProperty, Program, Statement, StaticBlock, VariableDeclaration, VariableDeclarationKind,
    WhileStatement,
};
use oxc_ast_visit::{Visit, walk};
use oxc_span::{GetSpan, Span};
use oxc_syntax::scope::ScopeFlags;

use super::edits::EditList;
use super::imports;

const INTERRUPT_CHECK: &str = "__coracle.check();";

/// The edits and properties found in a cell.
#[derive(Debug, Default)]
pub(super) struct CellRewrite<'s> {
    source: &'s str,
    pub edits: EditList,
    /// The names that the cell declares and assigns.
    pub names: BTreeSet<String>,
    /// Functions, which move to the beginning.
    pub moved: Vec<Span>,
    /// Whether the cell awaits at its top level.
    pub waits: bool,
    functions: usize,
    /// The start offsets of declarations in the head of a loop.
    heads: HashSet<u32>,
}

impl<'s> CellRewrite<'s> {
    pub(super) fn of_program(source: &'s str, program: &Program<'_>) -> Self {
        let mut waits = AwaitFinder::default();
        waits.visit_program(program);
        let mut survey = Self { source, waits: waits.0, ..Self::default() };
        survey.rewrite_top_level(program);
        survey.edits.sort();
        survey
    }

    fn rewrite_top_level(&mut self, program: &Program<'_>) {
        // Functions have no value and are moved away.
        let is_step = |statement: &Statement<'_>| {
            !matches!(statement, Statement::EmptyStatement(_) | Statement::FunctionDeclaration(_))
        };
        let last = program.body.iter().rposition(is_step);
        for (index, statement) in program.body.iter().enumerate() {
            self.rewrite_statement(statement, Some(index) == last);
        }
        if let (None, Some(text)) = (last, program.directives.last()) {
            self.return_span(text.expression.span);
        }
    }

    fn rewrite_statement(&mut self, statement: &Statement<'_>, last: bool) {
        match statement {
            Statement::VariableDeclaration(declaration) => self.rewrite_variables(declaration),
            Statement::FunctionDeclaration(function) => self.move_function(function),
            Statement::ClassDeclaration(class) => self.rewrite_class(class),
            Statement::ImportDeclaration(import) => self.rewrite_import(import),
            Statement::ExportNamedDeclaration(export) => self.rewrite_export(export),
            Statement::ExportDefaultDeclaration(export) => self.rewrite_default_export(export, last),
            Statement::ExportAllDeclaration(export) => self.edits.replace(export.span, ";"),
            Statement::ExpressionStatement(statement) if last => {
                self.return_expression(&statement.expression)
            }
            other => self.visit_statement(other),
        }
    }

    fn return_expression(&mut self, expression: &Expression<'_>) {
        self.edits.insert(expression.span().start, "return (");
        self.visit_expression(expression);
        self.edits.insert(expression.span().end, ")");
    }

    fn return_span(&mut self, span: Span) {
        self.edits.insert(span.start, "return (");
        self.edits.insert(span.end, ")");
    }

    /// A top-level declaration. The leading semicolon keeps it from continuing an earlier statement
    /// that has none at its end.
    fn rewrite_variables(&mut self, declaration: &VariableDeclaration<'_>) {
        match declaration.kind {
            VariableDeclarationKind::Var | VariableDeclarationKind::Let | VariableDeclarationKind::Const => {
                self.rewrite_as_assignment(declaration, ";");
            }
            // Their values are disposed of at the end of the cell.
            VariableDeclarationKind::Using | VariableDeclarationKind::AwaitUsing => {
                walk::walk_variable_declaration(self, declaration);
            }
        }
    }

    fn rewrite_as_assignment(&mut self, declaration: &VariableDeclaration<'_>, before: &str) {
        let Some(first) = declaration.declarations.first() else { return };
        self.edits.replace(Span::new(declaration.span.start, first.span.start), format!("{before}void ("));
        for declarator in &declaration.declarations {
            self.visit_variable_declarator(declarator);
            if declarator.init.is_none() && declaration.kind == VariableDeclarationKind::Let {
                self.edits.insert(declarator.span.end, " = void 0");
            }
        }
        let end = declaration.span.end;
        match self.source.as_bytes().get(end as usize - 1) {
            Some(b';') => self.edits.insert(end - 1, ")"),
            _ => self.edits.insert(end, ");"),
        }
        self.record_names(declaration);
    }

    fn record_names(&mut self, declaration: &VariableDeclaration<'_>) {
        let patterns = declaration.declarations.iter().map(|declarator| &declarator.id);
        let names = patterns.flat_map(|pattern| pattern.get_binding_identifiers());
        self.names.extend(names.map(|identifier| identifier.name.to_string()));
    }

    fn move_function(&mut self, function: &Function<'_>) {
        self.moved.push(function.span);
        self.visit_function(function, ScopeFlags::Function);
    }

    fn rewrite_class(&mut self, class: &Class<'_>) {
        let Some(name) = &class.id else { return self.visit_class(class) };
        self.edits.insert(class.span.start, format!(";{} = ", name.name));
        self.visit_class(class);
        self.edits.insert(class.span.end, ";");
        self.names.insert(name.name.to_string());
    }

    fn rewrite_import(&mut self, import: &ImportDeclaration<'_>) {
        let (text, names) = imports::rewrite_import(import);
        self.edits.replace(import.span, text);
        self.names.extend(names);
    }

    fn rewrite_export(&mut self, export: &ExportNamedDeclaration<'_>) {
        let Some(declaration) = &export.declaration else { return self.edits.replace(export.span, ";") };
        self.edits.replace(Span::new(export.span.start, declaration.span().start), "");
        match declaration {
            Declaration::VariableDeclaration(declaration) => self.rewrite_variables(declaration),
            Declaration::FunctionDeclaration(function) => self.move_function(function),
            Declaration::ClassDeclaration(class) => self.rewrite_class(class),
            _ => {}
        }
    }

    fn rewrite_default_export(&mut self, export: &ExportDefaultDeclaration<'_>, last: bool) {
        let inner = export.declaration.span();
        self.edits.replace(Span::new(export.span.start, inner.start), ";");
        match &export.declaration {
            ExportDefaultDeclarationKind::FunctionDeclaration(function) if function.id.is_some() => {
                self.move_function(function);
            }
            ExportDefaultDeclarationKind::ClassDeclaration(class) if class.id.is_some() => {
                self.rewrite_class(class)
            }
            other => {
                self.edits.insert(inner.start, if last { "return (" } else { "void (" });
                self.visit_export_default_declaration_kind(other);
                self.edits.insert(inner.end, ");");
            }
        }
    }

    /// Lets an interrupt end a loop. V8 itself can stop a loop at the top level of a cell that does
    /// not await.
    fn add_interrupt_check(&mut self, body: &Statement<'_>) {
        let span = body.span();
        let wanted = self.waits || self.functions > 0;
        match body {
            Statement::BlockStatement(_) if wanted => {
                self.edits.insert(span.start + 1, INTERRUPT_CHECK);
                self.visit_statement(body);
            }
            _ if wanted => {
                self.edits.insert(span.start, format!("{{{INTERRUPT_CHECK}"));
                self.visit_statement(body);
                self.edits.insert(span.end, "}");
            }
            _ => self.visit_statement(body),
        }
    }
}

impl<'a> Visit<'a> for CellRewrite<'_> {
    /// A `var` in a block belongs to the cell, wherever it is.
    fn visit_variable_declaration(&mut self, declaration: &VariableDeclaration<'a>) {
        if self.functions > 0 || declaration.kind != VariableDeclarationKind::Var {
            return walk::walk_variable_declaration(self, declaration);
        }
        if !self.heads.contains(&declaration.span.start) {
            return self.rewrite_as_assignment(declaration, "");
        }
        if let Some(first) = declaration.declarations.first() {
            self.edits.replace(Span::new(declaration.span.start, first.span.start), "");
        }
        self.record_names(declaration);
        walk::walk_variable_declaration(self, declaration);
    }

    fn visit_function(&mut self, function: &Function<'a>, flags: ScopeFlags) {
        self.functions += 1;
        walk::walk_function(self, function, flags);
        self.functions -= 1;
    }

    fn visit_arrow_function_expression(&mut self, function: &ArrowFunctionExpression<'a>) {
        self.functions += 1;
        walk::walk_arrow_function_expression(self, function);
        self.functions -= 1;
    }

    fn visit_static_block(&mut self, block: &StaticBlock<'a>) {
        self.functions += 1;
        walk::walk_static_block(self, block);
        self.functions -= 1;
    }

    fn visit_while_statement(&mut self, statement: &WhileStatement<'a>) {
        self.visit_expression(&statement.test);
        self.add_interrupt_check(&statement.body);
    }

    fn visit_do_while_statement(&mut self, statement: &DoWhileStatement<'a>) {
        self.add_interrupt_check(&statement.body);
        self.visit_expression(&statement.test);
    }

    fn visit_for_statement(&mut self, statement: &ForStatement<'a>) {
        if let Some(init) = &statement.init {
            if let ForStatementInit::VariableDeclaration(declaration) = init {
                self.heads.insert(declaration.span.start);
            }
            self.visit_for_statement_init(init);
        }
        for expression in [&statement.test, &statement.update].into_iter().flatten() {
            self.visit_expression(expression);
        }
        self.add_interrupt_check(&statement.body);
    }

    fn visit_for_in_statement(&mut self, statement: &ForInStatement<'a>) {
        if let ForStatementLeft::VariableDeclaration(declaration) = &statement.left {
            self.heads.insert(declaration.span.start);
        }
        self.visit_for_statement_left(&statement.left);
        self.visit_expression(&statement.right);
        self.add_interrupt_check(&statement.body);
    }

    fn visit_for_of_statement(&mut self, statement: &ForOfStatement<'a>) {
        if let ForStatementLeft::VariableDeclaration(declaration) = &statement.left {
            self.heads.insert(declaration.span.start);
        }
        self.visit_for_statement_left(&statement.left);
        self.visit_expression(&statement.right);
        self.add_interrupt_check(&statement.body);
    }

    fn visit_import_expression(&mut self, import: &ImportExpression<'a>) {
        if import.phase.is_none() {
            let keyword = Span::sized(import.span.start, 6);
            self.edits.replace(keyword, "__coracle.load");
        }
        walk::walk_import_expression(self, import);
    }

    fn visit_meta_property(&mut self, property: &MetaProperty<'a>) {
        if property.meta.name == "import" {
            self.edits.replace(property.span, "__coracle.meta");
        }
    }
}

/// Whether the top level of the cell awaits something.
#[derive(Default)]
struct AwaitFinder(bool);

impl<'a> Visit<'a> for AwaitFinder {
    fn visit_await_expression(&mut self, _: &AwaitExpression<'a>) {
        self.0 = true;
    }

    fn visit_import_declaration(&mut self, _: &ImportDeclaration<'a>) {
        self.0 = true;
    }

    fn visit_variable_declaration(&mut self, declaration: &VariableDeclaration<'a>) {
        self.0 |= declaration.kind == VariableDeclarationKind::AwaitUsing;
        walk::walk_variable_declaration(self, declaration);
    }

    fn visit_for_of_statement(&mut self, statement: &ForOfStatement<'a>) {
        self.0 |= statement.r#await;
        walk::walk_for_of_statement(self, statement);
    }

    fn visit_function(&mut self, _: &Function<'a>, _: ScopeFlags) {}

    fn visit_arrow_function_expression(&mut self, _: &ArrowFunctionExpression<'a>) {}
}
