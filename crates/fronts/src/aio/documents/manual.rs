//! `/llms.txt`: how to use the sandbox, for a language model.

use std::sync::LazyLock;

use super::super::operations::offered_operations;
use super::pages::section_title;

/// The written part of the manual.
const INTRODUCTION: &str = include_str!("manual.md");

pub(super) static MANUAL: LazyLock<String> = LazyLock::new(|| {
    let mut manual = format!("{INTRODUCTION}\n## All operations\n");
    for (tag, operations) in offered_operations() {
        manual.push_str(&format!("\n### {}\n\n", section_title(tag)));
        for operation in operations {
            manual.push_str(&format!("- `{}`: {}\n", operation.at, operation.summary));
        }
    }
    manual
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_that_the_text_names_is_offered() {
        let all: Vec<_> = offered_operations().into_iter().flat_map(|(_, operations)| operations).collect();
        let named: Vec<_> = INTRODUCTION
            .split('`')
            .filter(|text| ["GET ", "POST ", "DELETE "].iter().any(|method| text.starts_with(method)))
            .collect();
        assert!(named.len() > 10, "{named:?}");
        for text in named {
            let found = all.iter().any(|operation| operation.at == text);
            assert!(found, "`{text}` is not an operation");
        }
    }
}
