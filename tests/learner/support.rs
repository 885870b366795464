//! A tiny regression, and a training that prints nothing.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn::train::logger::{EvaluationProgressLogger, InMemoryMetricLogger, TrainingProgressLogger};
use burn::train::metric::{MetricDefinition, MetricId};
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining,
};
use burn::train::{RegressionOutput, SupervisedTraining};
use burn_lean_amp::{
    Amp, AmpInferenceStep, AmpTrainStep, Autocast, AutocastConfig, DynamicLossScale, Fallback,
    GradScalerConfig, LossScale,
};
use burn_lean_reparam::each_float;

/// `y = second(relu(first(x)))` with fixed weights.
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    pub(crate) first: Linear,
    pub(crate) second: Linear,
}

impl Mlp {
    pub(crate) fn new(device: &Device) -> Self {
        let linear = |weight: TensorData, config: LinearConfig| {
            let mut linear = config.init(device);
            linear.weight = Param::from_data(weight, device);
            linear.bias = Some(Param::from_data(
                TensorData::zeros::<f32, _>([config.d_output]),
                device,
            ));
            linear
        };
        Self {
            first: linear(
                TensorData::from([[1.0f32, -0.5, 0.25], [0.5, 1.0, -0.75]]),
                LinearConfig::new(2, 3),
            ),
            second: linear(
                TensorData::from([[0.5f32], [-0.25], [0.75]]),
                LinearConfig::new(3, 1),
            ),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let h = burn::tensor::activation::relu(self.first.forward(x));
        self.second.forward(h)
    }

    fn output(&self, autocast: &Autocast, batch: Batch) -> RegressionOutput {
        let y = autocast.forward(batch.x, |x| self.forward(x));
        let loss = (y.clone() - batch.y.clone()).square().mean();
        RegressionOutput::new(loss, y, batch.y)
    }
}

impl AmpTrainStep for Mlp {
    type Input = Batch;
    type Output = RegressionOutput;

    fn train_step(&self, autocast: &Autocast, batch: Batch) -> (Tensor<1>, RegressionOutput) {
        let output = self.output(autocast, batch);
        (output.loss.clone(), output)
    }
}

impl AmpInferenceStep for Mlp {
    type Input = Batch;
    type Output = RegressionOutput;

    fn inference_step(&self, autocast: &Autocast, batch: Batch) -> RegressionOutput {
        self.output(autocast, batch)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Batch {
    pub(crate) x: Tensor<2>,
    pub(crate) y: Tensor<2>,
}

pub(crate) type Row = ([f32; 2], f32);

#[derive(Clone)]
pub(crate) struct Rows;

impl Batcher<Row, Batch> for Rows {
    fn batch(&self, rows: Vec<Row>, device: &Device) -> Batch {
        batch(&rows, device)
    }
}

pub(crate) fn batch(rows: &[Row], device: &Device) -> Batch {
    let x: Vec<f32> = rows.iter().flat_map(|(x, _)| *x).collect();
    let y: Vec<f32> = rows.iter().map(|(_, y)| *y).collect();
    Batch {
        x: Tensor::from_data(TensorData::new(x, [rows.len(), 2]), device),
        y: Tensor::from_data(TensorData::new(y, [rows.len(), 1]), device),
    }
}

/// Samples of `y = 2 x0 - x1`.
pub(crate) fn samples(count: usize) -> Vec<Row> {
    (0..count)
        .map(|i| [(i % 5) as f32 * 0.25, (i % 3) as f32 * 0.5])
        .map(|x| (x, 2.0 * x[0] - x[1]))
        .collect()
}

/// The samples, of which those numbered in `broken` are infinite.
pub(crate) fn samples_with_infinity(count: usize, broken: &[usize]) -> Vec<Row> {
    let mut rows = samples(count);
    for &i in broken {
        rows[i].0[0] = f32::INFINITY;
    }
    rows
}

pub(crate) fn loader(rows: Vec<Row>, batch_size: usize) -> Arc<dyn DataLoader<Batch>> {
    DataLoaderBuilder::new(Rows)
        .batch_size(batch_size)
        .build(InMemDataset::new(rows))
}

/// A scale that grows and backs off within a few steps.
pub(crate) fn scaler() -> GradScalerConfig {
    GradScalerConfig::new(LossScale::Dynamic(DynamicLossScale {
        init_scale: 1024.0,
        growth_interval: 3,
        hysteresis: 2,
        ..Default::default()
    }))
}

pub(crate) fn amp(device: &Device, dtype: FloatDType, scaler: &GradScalerConfig) -> Amp<Mlp> {
    let autocast = AutocastConfig::new(dtype).with_fallback(Fallback::Emulate);
    Amp::new(Mlp::new(device), &autocast, scaler).unwrap()
}

/// A silent training on one batch size, validated on clean samples.
pub(crate) fn training(
    directory: &Path,
    train: Vec<Row>,
    batch_size: usize,
) -> SupervisedTraining<Amp<Mlp>> {
    training_with(directory, loader(train, batch_size))
}

/// As [`training`], with a loader of one's own.
pub(crate) fn training_with(
    directory: &Path,
    train: Arc<dyn DataLoader<Batch>>,
) -> SupervisedTraining<Amp<Mlp>> {
    SupervisedTraining::new(directory, train, loader(samples(8), 4))
        .with_application_logger(None)
        .with_metric_logger(InMemoryMetricLogger::new())
        .renderer(Box::new(Recorder::default()))
}

/// Mean squared error of the model on clean samples, in F32.
pub(crate) fn error_of(model: &Mlp, device: &Device) -> f32 {
    let batch = batch(&samples(15), device);
    (model.forward(batch.x) - batch.y)
        .square()
        .mean()
        .into_scalar()
}

/// Bits of every float parameter, with their paths, in module order.
pub(crate) fn bits<M: Module>(model: &M) -> Vec<(String, Vec<u32>)> {
    let mut found = Vec::new();
    each_float(model, |at, float| {
        let bits = float.data().iter::<f32>().map(f32::to_bits).collect();
        found.push((at.path(), bits));
    });
    found
}

/// A renderer that keeps the numeric training metrics by name, and shows nothing.
#[derive(Clone, Default)]
pub(crate) struct Recorder {
    names: HashMap<MetricId, String>,
    values: Arc<Mutex<HashMap<String, Vec<f64>>>>,
}

impl Recorder {
    pub(crate) fn values(&self, name: &str) -> Vec<f64> {
        self.values
            .lock()
            .unwrap()
            .get(name)
            .cloned()
            .unwrap_or_default()
    }
}

impl MetricsRendererTraining for Recorder {
    fn update_train(&mut self, state: MetricState) {
        if let MetricState::Numeric(entry, Some(value)) = state {
            let name = self.names[&entry.metric_id].clone();
            let mut values = self.values.lock().unwrap();
            values.entry(name).or_default().push(value.current());
        }
    }

    fn update_valid(&mut self, _state: MetricState) {}
}

impl MetricsRenderer for Recorder {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.names
            .insert(definition.metric_id, definition.name.to_string());
    }
}

impl MetricsRendererEvaluation for Recorder {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}
}

impl TrainingProgressLogger for Recorder {
    fn start(&mut self, _: usize, _: usize, _: Option<usize>, _: Option<&str>) {}
    fn update_epoch(&mut self, _: usize) {}
    fn start_split(&mut self, _: &str, _: usize) {}
    fn update_split(&mut self, _: usize) {}
    fn end_split(&mut self) {}
    fn end(&mut self) {}
    fn log_event_training(&mut self, _: String) {}
}

impl EvaluationProgressLogger for Recorder {
    fn start_global_progress(&mut self, _: usize) {}
    fn start_test(&mut self, _: &str, _: usize) {}
    fn update_test_progress(&mut self, _: usize) {}
    fn end_test(&mut self) {}
    fn end_global_progress(&mut self) {}
    fn log_event_evaluation(&mut self, _: String) {}
}
