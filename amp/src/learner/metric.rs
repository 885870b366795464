//! The loss scale and the skipped steps in the dashboard.

use std::sync::Arc;

use burn::tensor::TensorReadError;
use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};

use super::Monitor;

/// Defines a metric that shows one number of the monitor, as it is when the dashboard is drawn.
///
/// A mean over the epoch would be of no use for either of them, so there is none.
macro_rules! monitor_metric {
    ($(#[$doc:meta])* $metric:ident, $name:literal, $monitor:ident => $value:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub struct $metric {
            name: MetricName,
            monitor: Monitor,
            value: f64,
        }

        impl $metric {
            /// A metric over `monitor`; register it for the training split.
            pub fn new(monitor: &Monitor) -> Self {
                Self {
                    name: Arc::new($name.to_string()),
                    monitor: monitor.clone(),
                    value: 0.0,
                }
            }

            fn read(&mut self) -> f64 {
                let $monitor = &self.monitor;
                self.value = $value;
                self.value
            }
        }

        impl Metric for $metric {
            type Input = ();

            fn name(&self) -> MetricName {
                self.name.clone()
            }

            fn attributes(&self) -> MetricAttributes {
                NumericAttributes {
                    unit: None,
                    higher_is_better: false,
                }
                .into()
            }

            fn update(
                &mut self,
                _item: &(),
                _metadata: &MetricMetadata,
            ) -> Result<SerializedEntry, TensorReadError> {
                let value = self.read();
                Ok(entry(value, NumericEntry::Value(value)))
            }

            fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
                let value = self.read();
                Ok(entry(value, NumericEntry::Final(value)))
            }

            fn clear(&mut self) {}
        }

        impl Numeric for $metric {
            fn value(&self) -> Option<NumericEntry> {
                Some(NumericEntry::Value(self.value))
            }

            fn running_value(&self) -> Option<NumericEntry> {
                Some(NumericEntry::Value(self.value))
            }

            fn final_value(&self) -> NumericEntry {
                NumericEntry::Final(self.value)
            }
        }
    };
}

fn entry(value: f64, serialized: NumericEntry) -> SerializedEntry {
    SerializedEntry::new(value.to_string(), serialized.serialize())
}

monitor_metric!(
    /// The loss scale after the last step.
    LossScaleMetric, "Loss Scale", monitor => monitor.state().scale.into()
);

monitor_metric!(
    /// Steps skipped since the training started, in all its epochs.
    SkippedStepsMetric, "Skipped Steps", monitor => monitor.state().skipped_steps as f64
);
