//! A set of tools: how models see them, the functions behind them, and the form of their results.

use std::collections::BTreeSet;
use std::pin::Pin;

use rmcp::model::{CallToolResult, ContentBlock, JsonObject, Tool};
use serde_json::Value;

/// A longer result has only text: the same data again would double it.
const MAX_STRUCTURED_BYTES: usize = 64 << 10;

/// How many characters of a name that a client sent appear in a message.
const MAX_SHOWN_CHARS: usize = 100;

/// The arguments of a call, by name.
pub(crate) type ToolArguments = JsonObject;

pub(crate) type ToolFuture = Pin<Box<dyn Future<Output = Result<ToolOutput, ToolFailure>> + Send>>;

/// Carries out a call. Dropping the future ends the call.
pub(crate) type ToolFunction<C> = fn(C, ToolArguments) -> ToolFuture;

/// The result of a call.
#[derive(Debug)]
pub(crate) struct ToolOutput {
    /// The text for the model.
    pub(crate) text: String,
    /// The same for programs; a JSON object.
    pub(crate) data: Value,
    pub(crate) images: Vec<ToolImage>,
}

#[derive(Debug)]
pub(crate) struct ToolImage {
    /// In base64.
    pub(crate) data: String,
    pub(crate) media_type: &'static str,
}

/// A call that failed. The message tells the model what to do differently.
#[derive(Debug)]
pub(crate) struct ToolFailure {
    pub(crate) message: String,
    /// The details for programs.
    pub(crate) data: Option<Value>,
}

impl ToolOutput {
    /// A result whose text is its data.
    pub(crate) fn from_data(data: Value) -> Self {
        Self { text: data.to_string(), data, images: Vec::new() }
    }
}

impl ToolFailure {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), data: None }
    }
}

/// The tools of a server. `C` is what their functions need besides the arguments.
pub(crate) struct ToolSet<C>(Vec<ToolEntry<C>>);

struct ToolEntry<C> {
    definition: Tool,
    run: ToolFunction<C>,
}

impl<C> ToolSet<C> {
    /// Combines a JSON list of definitions, which are part of the program, with the functions of the same names.
    pub(crate) fn new(definitions: &str, functions: &[(&str, ToolFunction<C>)]) -> Self {
        let definitions: Vec<Tool> = serde_json::from_str(definitions).expect("the definitions are valid");
        let entries = definitions.into_iter().map(|definition| {
            let function = functions.iter().find(|(name, _)| *name == definition.name);
            let (_, run) = function.unwrap_or_else(|| panic!("`{}` has no function", definition.name));
            ToolEntry { definition, run: *run }
        });
        let entries: Vec<_> = entries.collect();
        assert_eq!(entries.len(), functions.len(), "every function has a definition");
        Self(entries)
    }

    pub(crate) fn definitions(&self) -> Vec<Tool> {
        self.0.iter().map(|entry| entry.definition.clone()).collect()
    }

    pub(crate) fn definition(&self, name: &str) -> Option<&Tool> {
        self.0.iter().find(|entry| entry.definition.name == name).map(|entry| &entry.definition)
    }

    /// Calls a tool; `None` if there is none with this name.
    pub(crate) async fn call(
        &self,
        name: &str,
        context: C,
        arguments: ToolArguments,
    ) -> Option<CallToolResult> {
        let entry = self.0.iter().find(|entry| entry.definition.name == name)?;
        let arguments = without_nulls(arguments);
        Some(match check_names(&entry.definition, &arguments) {
            Ok(()) => call_result((entry.run)(context, arguments).await),
            Err(failure) => call_result(Err(failure)),
        })
    }
}

/// Models send `null` for what they leave out.
fn without_nulls(arguments: ToolArguments) -> ToolArguments {
    arguments.into_iter().filter(|(_, value)| !value.is_null()).collect()
}

/// Refuses unknown arguments, which a tool would silently ignore, and misses required ones.
fn check_names(definition: &Tool, arguments: &ToolArguments) -> Result<(), ToolFailure> {
    let schema = &definition.input_schema;
    let properties = schema.get("properties").and_then(Value::as_object);
    let known: BTreeSet<&str> = properties.into_iter().flatten().map(|(name, _)| name.as_str()).collect();
    let names = || known.iter().copied().collect::<Vec<_>>().join(", ");
    if let Some(unknown) = arguments.keys().find(|name| !known.contains(name.as_str())) {
        let shown: String = unknown.chars().take(MAX_SHOWN_CHARS).collect();
        let takes = if known.is_empty() { "no arguments".to_owned() } else { names() };
        let message = format!("Unknown argument `{shown}`. The tool takes: {takes}.");
        return Err(ToolFailure::new(message));
    }
    let required = schema.get("required").and_then(Value::as_array);
    let mut required = required.into_iter().flatten().filter_map(Value::as_str);
    match required.find(|name| !arguments.contains_key(*name)) {
        Some(missing) => {
            let message = format!("Missing argument `{missing}`. The tool takes: {}.", names());
            Err(ToolFailure::new(message))
        }
        None => Ok(()),
    }
}

fn call_result(result: Result<ToolOutput, ToolFailure>) -> CallToolResult {
    match result {
        Ok(ToolOutput { text, data, images }) => {
            let structured = (text.len() <= MAX_STRUCTURED_BYTES).then_some(data);
            let images = images.into_iter().map(|image| ContentBlock::image(image.data, image.media_type));
            let content = std::iter::once(ContentBlock::text(text)).chain(images).collect();
            let mut result = CallToolResult::success(content);
            result.structured_content = structured;
            result
        }
        Err(ToolFailure { message, data }) => {
            let mut result = CallToolResult::error(vec![ContentBlock::text(message)]);
            result.structured_content = data;
            result
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const DEFINITIONS: &str = r#"[{"name": "echo", "description": "Repeat a text",
        "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}, "times": {"type": "integer"}},
        "required": ["text"]}}]"#;

    fn echo(prefix: &'static str, arguments: ToolArguments) -> ToolFuture {
        Box::pin(async move {
            let text = arguments["text"].as_str().ok_or_else(|| ToolFailure::new("`text` is no text"))?;
            Ok(ToolOutput::from_data(json!({"text": format!("{prefix}{text}")})))
        })
    }

    async fn call(name: &str, arguments: Value) -> Option<Value> {
        let tools = ToolSet::new(DEFINITIONS, &[("echo", echo)]);
        let Value::Object(arguments) = arguments else { panic!("not an object") };
        let result = tools.call(name, "> ", arguments).await?;
        Some(serde_json::to_value(result).unwrap())
    }

    #[tokio::test]
    async fn results_are_text_and_data() {
        let result = call("echo", json!({"text": "a", "times": null})).await.unwrap();
        assert_eq!(result["content"], json!([{"type": "text", "text": r#"{"text":"> a"}"#}]));
        assert_eq!(
            (&result["structuredContent"], &result["isError"]),
            (&json!({"text": "> a"}), &json!(false))
        );
        let long = call("echo", json!({"text": "a".repeat(MAX_STRUCTURED_BYTES)})).await.unwrap();
        assert_eq!(long.get("structuredContent"), None);
    }

    #[tokio::test]
    async fn failures_are_results_that_name_the_argument() {
        for (arguments, expected) in [
            (json!({}), "Missing argument `text`"),
            (json!({"text": null}), "Missing argument `text`"),
            (json!({"text": "a", "txt": 1}), "Unknown argument `txt`. The tool takes: text, times."),
            (json!({"text": 7}), "`text` is no text"),
        ] {
            let result = call("echo", arguments.clone()).await.unwrap();
            assert_eq!(result["isError"], true, "{arguments}");
            assert!(result["content"][0]["text"].as_str().unwrap().contains(expected), "{result}");
        }
        assert_eq!(call("other", json!({})).await, None);
    }
}
