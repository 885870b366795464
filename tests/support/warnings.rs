//! What crates report at the level of a warning.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Dispatch, Event, Level, Metadata, Subscriber};

/// The warnings of a crate, or of a module of it, while `run` runs.
pub(crate) fn warnings<T>(of: &'static str, run: impl FnOnce() -> T) -> (T, Vec<String>) {
    let lines = Lines {
        of,
        lines: Arc::default(),
    };
    // The only subscriber of a process is not asked by other threads: a warning that one of them
    // reports first would be switched off for all. Of two, both are asked.
    let _second = Dispatch::new(lines.clone());
    let result = tracing::subscriber::with_default(lines.clone(), run);
    let lines = lines.lines.lock().unwrap().clone();
    (result, lines)
}

#[derive(Clone)]
struct Lines {
    of: &'static str,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN && metadata.target().starts_with(self.of)
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

impl Visit for Lines {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            self.lines.lock().unwrap().push(format!("{value:?}"));
        }
    }
}
