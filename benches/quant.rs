//! Fake quantization: its throughput, what it adds to a training step, and what a converted model
//! costs in inference.
//!
//! `cargo bench --bench quant -- --device flex --json FILE`
//!
//! All variants of a table run interleaved in one process; times and ratios are medians.

#[path = "support/mod.rs"]
mod harness;
#[path = "../examples/support/mod.rs"]
mod support;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Distribution, Tensor};
use burn_lean::quant::{
    ConvertConfig, Dequantize, FakeQuantizeConfig, ForwardQ, Granularity, Learned, NumberFormat,
    QatConfig, QuantParams, Scheme, Unsupported, WeightConfig, advance, calibrate, fake_quantize,
    save_safetensors,
};
use clap::Parser;
use harness::{ConvNet, Variant, interleave};
use support::{Cell, DeviceName, Table};

/// Benchmark of quantization.
#[derive(Parser)]
struct Arguments {
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    device: DeviceName,
    /// Sizes for a GPU instead of a CPU.
    #[arg(long)]
    large: bool,
    /// Samples of each variant.
    #[arg(long, default_value_t = 15)]
    samples: usize,
    /// Steps in a sample.
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// Only tables whose name contains this: `throughput`, `step`, `inference`,
    /// `size`.
    #[arg(long, default_value = "")]
    table: String,
    /// Also write the tables to FILE-throughput.json and so on.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    support::exit(run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let device = arguments.device.open()?;
    if "throughput".contains(&arguments.table) {
        throughput(arguments, &device)?;
    }
    if "step".contains(&arguments.table) {
        step(arguments, &device.clone().autodiff())?;
    }
    if "inference".contains(&arguments.table) {
        inference(arguments, &device)?;
    }
    if "size".contains(&arguments.table) {
        // Bytes do not depend on the device; that of the kernel of three channels, whether it can be
        // a quantized tensor, does.
        size(arguments, &Device::flex())?;
    }
    Ok(())
}

/// Rows and columns of the tensor of the throughput table: 16 MiB, more than a cache holds.
const SHAPE: [usize; 2] = [2048, 2048];

fn throughput(arguments: &Arguments, device: &Device) -> Result<(), Box<dyn Error>> {
    let x = Tensor::<2>::random(SHAPE, Distribution::Normal(0.0, 1.0), device);
    let schemes = [
        ("per tensor", Granularity::PerTensor),
        ("per row", Granularity::PerChannel { axis: 0 }),
        ("per column", Granularity::PerChannel { axis: 1 }),
    ];
    let copied = x.clone();
    let mut names = vec!["copy".to_string()];
    let mut variants = vec![Variant::new(move || {
        // Reads and writes every element, as a copy does; `clone` would only count a reference.
        let _ = copied.clone().mul_scalar(1.0);
        Ok(())
    })];
    for (name, granularity) in schemes {
        let scheme = Scheme::symmetric(NumberFormat::int8()).with_granularity(granularity);
        let qparams = QuantParams::of(&x, &scheme)?;
        names.push(format!("fake quantize, {name}"));
        let value = x.clone();
        let (inference, params) = (scheme.clone(), qparams.clone());
        variants.push(Variant::new(move || {
            let _ = fake_quantize(value.clone(), &params, &inference);
            Ok(())
        }));
        names.push(format!("fake quantize with backward, {name}"));
        let leaf = Tensor::<2>::from_data(x.to_data(), &device.clone().autodiff()).require_grad();
        variants.push(Variant::new(move || {
            let y = fake_quantize(leaf.clone(), &qparams, &scheme);
            let _ = leaf.grad(&y.backward());
            Ok(())
        }));
    }
    let bar = support::progress((arguments.samples + 1) * variants.len(), "throughput");
    interleave(
        &mut variants,
        arguments.samples,
        arguments.steps,
        device,
        &bar,
    )?;

    let mut table = Table::new(
        format!("{SHAPE:?} F32 numbers on {device:?}; bytes read and written once"),
        &["operation", "ms", "GB/s", "time of the copy"],
    );
    let bytes = (2 * 4 * SHAPE[0] * SHAPE[1]) as f64;
    for (name, variant) in names.iter().zip(&variants) {
        let milliseconds = variant.median();
        table.push([
            name.as_str().into(),
            Cell::optional(milliseconds, 2),
            Cell::optional(milliseconds.map(|ms| bytes / ms / 1e6), 2),
            Cell::optional(variant.compared(&variants[0], |with, copy| with / copy), 2),
        ]);
    }
    table.publish_as(arguments.json.as_deref(), "throughput")?;
    Ok(())
}

/// The configs of the step and size tables; the first is FP32.
fn configs() -> [(&'static str, Option<QatConfig>); 5] {
    let bits = |weights, activations, learned| {
        let activation = Scheme::affine(NumberFormat::uint(activations));
        let activation = FakeQuantizeConfig::new(activation).with_learned(learned);
        QatConfig::new()
            .with_weight(WeightConfig::int(weights).with_learned(learned))
            .with_activation(Some(activation))
    };
    [
        ("FP32", None),
        ("W8", Some(bits(8, 8, Learned::None).with_activation(None))),
        ("W8A8", Some(bits(8, 8, Learned::None))),
        ("W4A4, learned scales", Some(bits(4, 4, Learned::Lsq))),
        ("W2A8, learned scales", Some(bits(2, 8, Learned::Lsq))),
    ]
}

fn step(arguments: &Arguments, device: &Device) -> Result<(), Box<dyn Error>> {
    let mut variants = Vec::new();
    for (_, config) in configs() {
        let model = ConvNet::new(arguments.large, device);
        let model = match &config {
            Some(config) => config.prepare(model)?,
            None => model,
        };
        let input = ConvNet::input(arguments.large, device);
        let mut optim = AdamWConfig::new().init();
        let mut model = Some(model);
        variants.push(Variant::new(move || {
            let current = model.take().expect("the model is put back after each step");
            let loss = current.forward(input.clone()).square().mean();
            let grads = GradientsParams::from_grads(loss.backward(), &current);
            model = Some(advance(optim.step(1e-4, current, grads)));
            Ok(())
        }));
    }
    let bar = support::progress((arguments.samples + 1) * variants.len(), "step");
    let (samples, steps) = (arguments.samples, arguments.steps);
    interleave(&mut variants, samples, steps, device, &bar)?;

    let mut table = Table::new(
        format!("training step of the conv net with AdamW on {device:?}"),
        &["quantized", "step ms", "time of FP32"],
    );
    for ((name, _), variant) in configs().into_iter().zip(&variants) {
        table.push([
            name.into(),
            Cell::optional(variant.median(), 2),
            Cell::optional(variant.compared(&variants[0], |qat, f32| qat / f32), 2),
        ]);
    }
    table.publish_as(arguments.json.as_deref(), "step")?;
    Ok(())
}

/// Two linear layers as wide as they are long.
#[derive(Module, Debug)]
struct Mlp {
    first: Linear,
    second: Linear,
}

impl Mlp {
    fn new(width: usize, device: &Device) -> Self {
        let layer = LinearConfig::new(width, width);
        Self {
            first: layer.init(device),
            second: layer.init(device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward_q(relu(self.first.forward_q(x)))
    }
}

/// Name, model and resident bytes.
type Shipped<M> = (&'static str, M, usize);

/// The ways in which a model of the inference table runs; the first is FP32.
fn deployments<M: Module + 'static>(
    model: M,
    run: &impl Fn(&M),
) -> Result<Vec<Shipped<M>>, Box<dyn Error>> {
    let mut all = Vec::new();
    let keep = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
    let every_use = keep.clone().with_dequantize(Dequantize::EveryUse);
    let weights = QatConfig::new().with_activation(None);
    all.push(("FP32", model.clone(), 4 * model.num_params()));
    for (name, config, converter) in [
        ("W8", &weights, &keep),
        ("W8, codes alone", &weights, &every_use),
        ("W8A8", &QatConfig::new(), &keep),
        ("W8A8, codes alone", &QatConfig::new(), &every_use),
    ] {
        let prepared = config.prepare(model.clone())?;
        let prepared = match config.activation {
            Some(_) => calibrate(prepared, |model| run(model))?,
            None => prepared,
        };
        let (converted, report) = converter.convert(prepared)?;
        all.push((name, converted, report.resident_bytes()));
    }
    Ok(all)
}

/// Converted models beside the float ones that they come from.
fn inference(arguments: &Arguments, device: &Device) -> Result<(), Box<dyn Error>> {
    let mut table = Table::new(
        format!("inference on {device:?}"),
        &[
            "model",
            "batch",
            "variant",
            "ms",
            "times as fast as FP32",
            "resident bytes",
        ],
    );
    for (width, batch) in [(512, 1), (512, 64), (2048, 1), (2048, 64)] {
        let x = Tensor::<2>::random([batch, width], Distribution::Default, device);
        let run = move |model: &Mlp| drop(model.forward(x.clone()));
        let name = format!("MLP {width}");
        of_model(
            arguments,
            device,
            (&name, batch),
            Mlp::new(width, device),
            run,
            &mut table,
        )?;
    }
    let x = ConvNet::input(arguments.large, device);
    for batch in [1, x.dims()[0]] {
        let x = x.clone().narrow(0, 0, batch);
        let run = move |model: &ConvNet| drop(model.forward(x.clone()));
        let model = ConvNet::new(arguments.large, device);
        of_model(
            arguments,
            device,
            ("conv net", batch),
            model,
            run,
            &mut table,
        )?;
    }
    table.publish_as(arguments.json.as_deref(), "inference")?;
    Ok(())
}

fn of_model<M: Module + 'static>(
    arguments: &Arguments,
    device: &Device,
    (name, batch): (&str, usize),
    model: M,
    run: impl Fn(&M) + Clone + 'static,
    table: &mut Table,
) -> Result<(), Box<dyn Error>> {
    let deployments = deployments(model, &run)?;
    let rows: Vec<_> = deployments
        .iter()
        .map(|(name, _, bytes)| (*name, *bytes))
        .collect();
    let variants = deployments.into_iter().map(|(_, model, _)| {
        let run = run.clone();
        Variant::new(move || {
            run(&model);
            Ok(())
        })
    });
    let mut variants: Vec<Variant> = variants.collect();
    let bar = support::progress((arguments.samples + 1) * variants.len(), "inference");
    let (samples, steps) = (arguments.samples, arguments.steps);
    interleave(&mut variants, samples, steps, device, &bar)?;
    for ((variant, bytes), timed) in rows.into_iter().zip(&variants) {
        table.push([
            name.into(),
            Cell::Integer(batch as u64),
            variant.into(),
            Cell::optional(timed.median(), 3),
            Cell::optional(timed.compared(&variants[0], |own, float| float / own), 2),
            Cell::Integer(bytes as u64),
        ]);
    }
    Ok(())
}

fn size(arguments: &Arguments, device: &Device) -> Result<(), Box<dyn Error>> {
    let mut table = Table::new(
        "size of the conv net, converted on flex",
        &[
            "quantized",
            "file bytes",
            "of FP32",
            "record bytes",
            "of FP32",
        ],
    );
    let folder = tempfile::tempdir()?;
    let mut float = None;
    for (name, config) in configs() {
        let model = ConvNet::new(arguments.large, device);
        let model = match config {
            Some(config) => {
                // Ranges of activations are part of both.
                let model = calibrate(config.prepare(model)?, |model| {
                    model.forward(ConvNet::input(arguments.large, device));
                })?;
                ConvertConfig::new().convert(model)?.0
            }
            None => model,
        };
        let file = save_safetensors(&model, folder.path().join("model.safetensors"))?;
        let record = model.into_record().into_bytes()?.len() as u64;
        let (float_file, float_record) = *float.get_or_insert((file, record));
        table.push([
            name.into(),
            Cell::Integer(file),
            Cell::Number(file as f64 / float_file as f64, 3),
            Cell::Integer(record),
            Cell::Number(record as f64 / float_record as f64, 3),
        ]);
    }
    table.publish_as(arguments.json.as_deref(), "size")?;
    Ok(())
}
