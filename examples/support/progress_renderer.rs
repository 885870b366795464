//! Burn's training dashboard as a progress bar: the last value of each numeric metric beside it.

use std::collections::BTreeMap;

use burn::train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn::train::metric::{MetricDefinition, MetricId};
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining,
};
use indicatif::ProgressBar;

pub(crate) struct ProgressRenderer {
    name: String,
    epoch: usize,
    epochs: usize,
    bar: ProgressBar,
    names: BTreeMap<String, String>,
    values: BTreeMap<String, f64>,
}

impl ProgressRenderer {
    pub(crate) fn new(name: String) -> Self {
        Self {
            name,
            epoch: 0,
            epochs: 0,
            bar: ProgressBar::hidden(),
            names: BTreeMap::new(),
            values: BTreeMap::new(),
        }
    }

    fn key(id: &MetricId) -> String {
        format!("{id:?}")
    }
}

impl MetricsRendererTraining for ProgressRenderer {
    fn update_train(&mut self, state: MetricState) {
        if let MetricState::Numeric(entry, Some(value)) = state
            && let Some(name) = self.names.get(&Self::key(&entry.metric_id))
        {
            self.values.insert(name.clone(), value.current());
            let values: Vec<String> = self
                .values
                .iter()
                .map(|(name, value)| format!("{name} {value:.4}"))
                .collect();
            self.bar.set_message(values.join(", "));
        }
    }

    fn update_valid(&mut self, _state: MetricState) {}
}

impl MetricsRenderer for ProgressRenderer {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.names.insert(
            Self::key(&definition.metric_id),
            definition.name.to_string(),
        );
    }
}

impl MetricsRendererEvaluation for ProgressRenderer {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}
}

impl TrainingProgressLogger for ProgressRenderer {
    fn start(&mut self, epochs: usize, _first: usize, _items: Option<usize>, _label: Option<&str>) {
        self.epochs = epochs;
    }

    fn update_epoch(&mut self, epoch: usize) {
        self.epoch = epoch;
    }

    fn start_split(&mut self, split: &str, items: usize) {
        let name = format!("{} {split} {}/{}", self.name, self.epoch + 1, self.epochs);
        self.bar = super::progress(items, name);
    }

    fn update_split(&mut self, items: usize) {
        self.bar.set_position(items as u64);
    }

    fn end_split(&mut self) {
        self.bar.finish_and_clear();
    }

    fn end(&mut self) {}

    fn log_event_training(&mut self, _event: String) {}
}

impl EvaluationProgressLogger for ProgressRenderer {
    fn start_global_progress(&mut self, _items: usize) {}
    fn start_test(&mut self, _name: &str, _items: usize) {}
    fn update_test_progress(&mut self, _items: usize) {}
    fn end_test(&mut self) {}
    fn end_global_progress(&mut self) {}
    fn log_event_evaluation(&mut self, _event: String) {}
}
