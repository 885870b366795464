//! Inference: how fast deployed models are against FP32, and what they keep in memory.
//!
//! `cargo bench --bench inference -- --device flex --json FILE`
//!
//! `burn` in the name of a variant: the model runs in Burn, on the device. `engine`: it runs in the
//! engine of `burn_lean::deploy`, with one thread on the CPU. All variants of a model run interleaved in
//! one process; `ratio` is the median of the time of FP32 in Burn over that of the variant.

#[path = "support/mod.rs"]
mod harness;
#[path = "inference/models.rs"]
mod models;
#[path = "../examples/support/mod.rs"]
mod support;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use burn::module::Module;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::amp::Autocast;
use burn_lean::deploy::{EngineConfig, Export};
use burn_lean::quant::{ConvertConfig, QatConfig, Unsupported, WeightConfig, calibrate};
use clap::Parser;
use harness::{ConvNet, Variant, interleave};
use models::{Encoder, Mlp, Recurrent};
use support::{Cell, DeviceName, ResNet8, Table};

/// Benchmark of inference.
#[derive(Parser)]
struct Arguments {
    /// Where Burn computes.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    device: DeviceName,
    /// Samples of each variant.
    #[arg(long, default_value_t = 15)]
    samples: usize,
    /// Steps in a sample.
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// Only models whose name contains this.
    #[arg(long, default_value = "")]
    model: String,
    /// Also write the rows to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    support::exit(run(&Arguments::parse()))
}

/// A model of the table.
pub(crate) trait Deployed: Module + Clone + 'static {
    /// A forward pass in which quantizers take part, of an input of F32.
    fn run(&self, x: Tensor<4>) -> Tensor<2>;
    /// The shape of one sample.
    const SAMPLE: [usize; 3];
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let device = arguments.device.open()?;
    device.seed(42);
    let mut table = Table::new(
        format!("inference on {device:?}"),
        &[
            "model",
            "batch",
            "variant",
            "device",
            "ms",
            "ratio",
            "resident_bytes",
        ],
    );
    let training = device.clone().autodiff();
    let mut bench = Bench {
        arguments,
        device,
        table: &mut table,
    };
    bench.model("Linear 4096", || Mlp::<4096>::new(1, &training))?;
    bench.model("MLP 512", || Mlp::<512>::new(2, &training))?;
    bench.model("CNN", || ConvNet::new(false, &training))?;
    bench.model("encoder", || Encoder::new(&training))?;
    bench.model("LSTM", || Recurrent::new(&training))?;
    bench.model("ResNet8", || ResNet8::new(&training))?;
    table.publish(arguments.json.as_deref())?;
    Ok(())
}

/// The table under way.
struct Bench<'a> {
    arguments: &'a Arguments,
    device: Device,
    table: &'a mut Table,
}

/// A variant, or why there is none.
type Prepared = Result<(Variant, usize), Box<dyn Error>>;

impl Bench<'_> {
    fn model<M: Deployed>(
        &mut self,
        name: &str,
        new: impl Fn() -> M,
    ) -> Result<(), Box<dyn Error>> {
        if !name.contains(&self.arguments.model) {
            return Ok(());
        }
        let float = new();
        for batch in [1, 32] {
            let [a, b, c] = M::SAMPLE;
            let distribution = burn::tensor::Distribution::Default;
            let x = Tensor::<4>::random([batch, a, b, c], distribution, &self.device);
            self.variants(name, batch, &float, &x)?;
        }
        Ok(())
    }

    fn variants<M: Deployed>(
        &mut self,
        name: &str,
        batch: usize,
        float: &M,
        x: &Tensor<4>,
    ) -> Result<(), Box<dyn Error>> {
        let w8a8 = |weight: WeightConfig| -> Result<M, Box<dyn Error>> {
            let prepared = QatConfig::new()
                .with_weight(weight)
                .prepare(float.clone())?;
            Ok(calibrate(prepared, |model| drop(model.run(x.clone())))?.valid())
        };
        let weights = |bits| -> Result<M, Box<dyn Error>> {
            let config = QatConfig::new().with_weight(WeightConfig::int(bits));
            Ok(config.with_activation(None).prepare(float.clone())?.valid())
        };
        let mut rows: Vec<(&str, Prepared)> = vec![
            (
                "FP32, burn",
                Ok(in_burn(float.valid(), x, 4 * float.num_params())),
            ),
            ("BF16, burn", self.half(float, FloatDType::BF16, x)),
            ("F16, burn", self.half(float, FloatDType::F16, x)),
        ];
        let keep = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
        rows.push(("W8A8, burn", {
            let (model, report) = keep.convert(w8a8(WeightConfig::int(8))?)?;
            Ok(in_burn(model, x, report.resident_bytes()))
        }));
        rows.push(("FP32, engine", in_engine(&float.valid(), x)));
        rows.push(("W8A8, engine", in_engine(&w8a8(WeightConfig::int(8))?, x)));
        rows.push(("W7A8, engine", in_engine(&w8a8(WeightConfig::int(7))?, x)));
        rows.push(("W4, engine", in_engine(&weights(4)?, x)));
        let mut known = Vec::new();
        let mut timed = Vec::new();
        for (variant, prepared) in rows {
            match prepared {
                Ok((variant_of, bytes)) => {
                    known.push((variant, bytes));
                    timed.push(variant_of);
                }
                Err(error) => println!("{name}, batch {batch}: no {variant}: {error}"),
            }
        }
        let bar = support::progress((self.arguments.samples + 1) * timed.len(), name);
        let (samples, steps) = (self.arguments.samples, self.arguments.steps);
        interleave(&mut timed, samples, steps, &self.device, &bar)?;
        let device = format!("{:?}", self.arguments.device).to_lowercase();
        for ((variant, bytes), one) in known.into_iter().zip(&timed) {
            self.table.push([
                name.into(),
                Cell::Integer(batch as u64),
                variant.into(),
                device.as_str().into(),
                Cell::optional(one.median(), 3),
                Cell::optional(one.compared(&timed[0], |own, float| float / own), 2),
                Cell::Integer(bytes as u64),
            ]);
        }
        Ok(())
    }

    /// Operation by operation in half precision; the weights stay in F32.
    fn half<M: Deployed>(&self, float: &M, dtype: FloatDType, x: &Tensor<4>) -> Prepared {
        if !self.device.supports_dtype(dtype) {
            return Err("the device does not compute in it".into());
        }
        let autocast = Autocast::new(dtype).cached();
        let (model, x) = (float.valid(), x.clone());
        let bytes = 4 * float.num_params();
        let run = move || {
            let y = autocast.run(&model, x.clone(), |model, x| model.run(x))?;
            drop(y.into_data());
            Ok(())
        };
        Ok((Variant::new(run), bytes))
    }
}

fn in_burn<M: Deployed>(model: M, x: &Tensor<4>, bytes: usize) -> (Variant, usize) {
    let x = x.clone();
    let run = move || {
        drop(model.run(x.clone()).into_data());
        Ok(())
    };
    (Variant::new(run), bytes)
}

fn in_engine<M: Deployed>(model: &M, x: &Tensor<4>) -> Prepared {
    let export = Export::record(model, x, |model: &M, x| model.run(x))?;
    let engine = EngineConfig::new().compile(export)?;
    let bytes = engine.report().resident_bytes;
    let x = x.clone();
    let run = move || {
        drop(engine.run(&x)?);
        Ok(())
    };
    Ok((Variant::new(run), bytes))
}
