//! The one core that every front calls.
