//! Recorded exchanges of the first version of the protocol, which every later agent must answer in
//! the same way. A later version may add fields, which an older server ignores.

use std::io::{Read, Write};

use serde_json::Value;
use testkit::recorded_exchange::RecordedExchange;
use wire::{Frame, FrameDecoder};

use crate::harness::{TestAgent, TreeMode};

/// Fields whose values differ in every run.
const CHANGING_FIELDS: [&str; 7] =
    ["pid", "started_ms", "ended_ms", "duration_ms", "user_ms", "system_ms", "max_rss_kib"];

/// The frames, with the changing numbers in control frames set to zero.
fn comparable(bytes: &[u8]) -> Vec<Frame> {
    let mut decoder = FrameDecoder::new();
    decoder.feed(bytes);
    let mut frames = Vec::new();
    while let Some(frame) = decoder.next_frame().unwrap() {
        frames.push(match frame {
            Frame::Control(json) => {
                let mut value: Value = serde_json::from_slice(&json).unwrap();
                zero_changing_fields(&mut value);
                Frame::Control(value.to_string().into())
            }
            other => other,
        });
    }
    assert!(decoder.into_rest().is_empty(), "the last frame is incomplete");
    frames
}

fn zero_changing_fields(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                if CHANGING_FIELDS.contains(&name.as_str()) {
                    assert!(field.is_u64(), "`{name}` is a number: {field}");
                    *field = Value::from(0);
                }
                zero_changing_fields(field);
            }
        }
        Value::Array(values) => values.iter_mut().for_each(zero_changing_fields),
        _ => {}
    }
}

/// The frames without the fields that are missing from the recorded ones.
fn without_additions(answered: Vec<Frame>, recorded: &[Frame]) -> Vec<Frame> {
    let answered = answered.into_iter().enumerate();
    let cut = answered.map(|(index, frame)| match (frame, recorded.get(index)) {
        (Frame::Control(json), Some(Frame::Control(known))) => {
            let mut value: Value = serde_json::from_slice(&json).unwrap();
            remove_additions(&mut value, &serde_json::from_slice(known).unwrap());
            Frame::Control(value.to_string().into())
        }
        (frame, _) => frame,
    });
    cut.collect()
}

fn remove_additions(value: &mut Value, known: &Value) {
    match (value, known) {
        (Value::Object(fields), Value::Object(known)) => {
            fields.retain(|name, _| known.contains_key(name));
            fields.iter_mut().for_each(|(name, field)| remove_additions(field, &known[name]));
        }
        (Value::Array(values), Value::Array(known)) => {
            values.iter_mut().zip(known).for_each(|(value, known)| remove_additions(value, known));
        }
        _ => {}
    }
}

#[test]
fn exchanges_of_version_one_are_answered_as_they_were_recorded() {
    let agent = TestAgent::with_trees(TreeMode::Runners);
    for recorded in RecordedExchange::load_all() {
        let mut stream = agent.connect();
        stream.write_all(&recorded.sent).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let expected = comparable(&recorded.answered);
        let answered = without_additions(comparable(&answer), &expected);
        assert_eq!(answered, expected, "{}", recorded.name);
    }
}
