//! Inference: how fast deployed models are against FP32, and what they keep in memory.
//!
//! `cargo bench --bench inference -- --device flex --json FILE`
//!
//! `fp32` is the model in Burn, on the device; the other variants are what `EngineConfig::new()` gives for
//! the model: FP32, weights in half precision, quantized, in groups of 32 inputs, or with zeros. `w8a8 in burn` is a converted
//! model that runs in Burn, `w8 in burn` and `w4 in burn` one with quantized weights alone, whose codes go
//! into the products of the device where those are exact and not slower (`Dequantize::InProduct`). All variants of a model run interleaved in one process; `ratio` is the median
//! of the time of `fp32` over that of the variant. `way` is what the engine chose. `--threads 1` measures on
//! one thread. With `--onnx DIR` the models of `fp32 engine` and `w8a8` are ONNX files there, too: `tools/judge_onnx.py`
//! puts onnxruntime's times of them beside the rows.

#[path = "support/mod.rs"]
mod harness;
#[path = "inference/models.rs"]
mod models;
#[path = "../examples/support/mod.rs"]
mod support;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::deploy::{Backend, EngineConfig, Export, FloatStorage, Form};
use burn_lean::quant::{
    ConvertConfig, Dequantize, FakeQuantizeConfig, Granularity, Mapping, NumberFormat,
    ObserverConfig, QatConfig, QuantError, QuantizedForward, Scheme, Unsupported, WeightConfig,
    WeightGranularity, calibrate, deploy::ConvertedWeight, quantizers,
};
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
    /// Threads of Burn and of the engine; 0 for one on each core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Only models whose name contains this.
    #[arg(long, default_value = "")]
    model: String,
    /// Also write the rows to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also write the models as ONNX files to this folder.
    #[arg(long, value_name = "DIR")]
    onnx: Option<PathBuf>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    support::exit(run(&Arguments::parse()))
}

/// A model of the table.
pub(crate) trait Deployed: Module + Clone + 'static {
    /// The forward pass, of an input of F32.
    fn run(&self, x: Tensor<4>) -> Tensor<2>;
    /// A forward pass in which quantizers take part: they do in `run`, where layers are called so.
    fn quantized(&self, _: &QuantizedForward, x: Tensor<4>) -> Result<Tensor<2>, QuantError> {
        Ok(self.run(x))
    }
    /// The shape of one sample.
    const SAMPLE: [usize; 3];
    /// Whether `run` calls layers by `forward_q`.
    const CALLS_QUANTIZERS: bool = true;
    /// Samples in a forward pass.
    const BATCHES: &[usize] = &[1, 32];
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    if arguments.threads > 0 {
        // Before anything else: the pool that Burn's CPU devices and the engine use is made once.
        rayon::ThreadPoolBuilder::new()
            .num_threads(arguments.threads)
            .build_global()?;
    }
    if let Some(folder) = &arguments.onnx {
        std::fs::create_dir_all(folder)
            .map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
    }
    let device = arguments.device.open()?;
    device.seed(42);
    let mut table = Table::new(
        format!(
            "inference on {device:?}, {} threads",
            rayon::current_num_threads()
        ),
        &[
            "model",
            "batch",
            "variant",
            "device",
            "ms",
            "ratio",
            "resident_bytes",
            "way",
            "onnx",
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

/// A variant, its bytes and what runs it; or why there is none.
type Prepared = Result<(Variant, usize, String), Box<dyn Error>>;

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
        for batch in M::BATCHES {
            let [a, b, c] = M::SAMPLE;
            let distribution = burn::tensor::Distribution::Default;
            let x = Tensor::<4>::random([*batch, a, b, c], distribution, &self.device);
            self.variants(name, *batch, &float, &x)?;
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
            let recorded = QuantizedForward::new();
            let mut failed = None;
            let calibrated = calibrate(prepared, |model| {
                failed = model.quantized(&recorded, x.clone()).err();
            })?;
            match failed {
                Some(error) => Err(error.into()),
                None => Ok(calibrated.valid()),
            }
        };
        let weights = |bits| -> Result<M, Box<dyn Error>> {
            let config = QatConfig::new().with_weight(WeightConfig::int(bits));
            Ok(config.with_activation(None).prepare(float.clone())?.valid())
        };
        let evaluated = float.valid();
        let engine = EngineConfig::new();
        let half = |storage| engine.clone().with_weights(storage);
        let mut rows: Vec<(&str, Prepared)> = vec![
            (
                "fp32",
                Ok(in_burn(float.valid(), x, 4 * float.num_params())),
            ),
            ("fp32 engine", in_engine(&engine, &evaluated, x)),
            ("bf16", in_engine(&half(FloatStorage::BF16), &evaluated, x)),
            ("f16", in_engine(&half(FloatStorage::F16), &evaluated, x)),
        ];
        let keep = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
        rows.push(("w8a8 in burn", {
            let (model, report) = keep.convert(w8a8(WeightConfig::int(8))?)?;
            Ok(in_burn(model, x, report.resident_bytes()))
        }));
        // Weights alone: codes go into the products of a device that is as fast with them, in layers that ask for them.
        let codes = match M::CALLS_QUANTIZERS {
            true => keep.clone().with_dequantize(Dequantize::InProduct),
            false => keep.clone(),
        };
        for (name, bits) in [("w8 in burn", 8), ("w4 in burn", 4)] {
            rows.push((name, {
                let (model, report) = codes.convert(weights(bits)?)?;
                let of_codes =
                    |weight: &&ConvertedWeight| weight.dequantize == Dequantize::InProduct;
                let products = report.weights.iter().filter(of_codes).count();
                let all = report.weights.len();
                let way = format!("Burn, {products} of {all} weights as codes");
                let (variant, bytes, _) = plain(model, x, report.resident_bytes());
                Ok((variant, bytes, way))
            }));
        }
        // The model's own forward pass: layers that call their quantizers multiply integers on a CPU.
        if M::CALLS_QUANTIZERS {
            rows.push(("w8a8 as codes in burn", {
                let (model, report) = codes.convert(w8a8(WeightConfig::int(8))?)?;
                let of_integers = |weight: &&ConvertedWeight| weight.multiplies_integers;
                let products = report.weights.iter().filter(of_integers).count();
                let way = format!(
                    "Burn, {products} of {} weights in integers",
                    report.weights.len()
                );
                let (variant, bytes, _) = plain(model, x, report.resident_bytes());
                Ok((variant, bytes, way))
            }));
        }
        rows.push(("w8a8", in_engine(&engine, &w8a8(WeightConfig::int(8))?, x)));
        rows.push(("w4", in_engine(&engine, &weights(4)?, x)));
        // As language models are quantized: groups of 32 inputs with a zero point each; and symmetric ones, with
        // inputs of 8 bits and a scale for each row.
        let groups =
            WeightConfig::int(4).with_granularity(WeightGranularity::PerBlock { size: 32 });
        let with_zeros = groups.clone().with_format(NumberFormat::uint(4));
        let with_zeros = with_zeros.with_mapping(Mapping::Affine);
        let of_rows = Scheme::symmetric(NumberFormat::int8().narrow())
            .with_granularity(Granularity::PerToken);
        let of_rows = FakeQuantizeConfig::new(of_rows).with_observer(ObserverConfig::Memoryless);
        for (name, weight, activation) in [
            ("w4 g32, zero points", with_zeros, None),
            ("w4a8 g32", groups, Some(of_rows)),
        ] {
            let config = QatConfig::new().with_weight(weight).with_attention(false);
            let config = config.with_activation(activation);
            let prepared = config.prepare(float.clone())?.valid();
            rows.push((name, in_engine(&engine, &prepared, x)));
        }
        for (name, zeros) in [("sparse 0.9", Zeros::Smallest), ("2:4", Zeros::TwoOfFour)] {
            let sparse = evaluated.clone().map(&mut { zeros });
            rows.push((name, in_engine(&engine, &sparse, x)));
        }
        let mut files = Vec::new();
        if let Some(folder) = &self.arguments.onnx {
            let stem = format!("{}_{batch}", name.replace(' ', "_"));
            let quantized = w8a8(WeightConfig::int(8))?;
            for (variant, model, form, ending) in [
                ("fp32 engine", &evaluated, Form::Float, "fp32"),
                ("w8a8", &quantized, Form::Qdq, "w8a8"),
            ] {
                let file = format!("{stem}_{ending}.onnx");
                write(model, x, form, &folder.join(&file))?;
                files.push((variant, file));
            }
        }
        let mut known = Vec::new();
        let mut timed = Vec::new();
        for (variant, prepared) in rows {
            match prepared {
                Ok((variant_of, bytes, way)) => {
                    known.push((variant, bytes, way));
                    timed.push(variant_of);
                }
                Err(error) => println!("{name}, batch {batch}: no {variant}: {error}"),
            }
        }
        let bar = support::progress((self.arguments.samples + 1) * timed.len(), name);
        let (samples, steps) = (self.arguments.samples, self.arguments.steps);
        interleave(&mut timed, samples, steps, &self.device, &bar)?;
        let device = format!("{:?}", self.arguments.device).to_lowercase();
        for ((variant, bytes, way), one) in known.into_iter().zip(&timed) {
            let file = files.iter().find(|(of, _)| *of == variant);
            self.table.push([
                name.into(),
                Cell::Integer(batch as u64),
                variant.into(),
                device.as_str().into(),
                Cell::optional(one.median(), 3),
                Cell::optional(one.compared(&timed[0], |own, float| float / own), 2),
                Cell::Integer(bytes as u64),
                way.into(),
                file.map_or(Cell::Empty, |(_, file)| file.as_str().into()),
            ]);
        }
        Ok(())
    }
}

fn in_burn<M: Deployed>(model: M, x: &Tensor<4>, bytes: usize) -> (Variant, usize, String) {
    if quantizers(&model).is_empty() {
        return plain(model, x, bytes);
    }
    let x = x.clone();
    let recorded = QuantizedForward::new().cached();
    let run = move || {
        drop(model.quantized(&recorded, x.clone())?.into_data());
        Ok(())
    };
    (Variant::new(run), bytes, "Burn".into())
}

/// The model's own forward pass.
fn plain<M: Deployed>(model: M, x: &Tensor<4>, bytes: usize) -> (Variant, usize, String) {
    let x = x.clone();
    let run = move || {
        drop(model.run(x.clone()).into_data());
        Ok(())
    };
    (Variant::new(run), bytes, "Burn".into())
}

fn in_engine<M: Deployed>(config: &EngineConfig, model: &M, x: &Tensor<4>) -> Prepared {
    let export = Export::record(model, x, |model: &M, x| model.run(x))?;
    let engine = config.compile(export)?;
    let report = engine.report();
    // The model in Burn stays where another way is hardly faster.
    let way = match (report.backend, report.times.first()) {
        (Backend::Own | Backend::Rten, Some(fastest)) => fastest.way.clone(),
        (backend, _) => backend.to_string(),
    };
    let x = x.clone();
    let run = move || {
        drop(engine.run(&x)?.into_data());
        Ok(())
    };
    Ok((Variant::new(run), report.resident_bytes, way))
}

/// The model as an ONNX file.
fn write<M: Deployed>(
    model: &M,
    x: &Tensor<4>,
    form: Form,
    path: &Path,
) -> Result<(), Box<dyn Error>> {
    let export = Export::record(model, x, |model: &M, x| model.run(x))?;
    export.to_onnx(form)?.model.save(path)?;
    Ok(())
}

/// Zeros in matrices and kernels, by magnitude.
#[derive(Clone, Copy)]
enum Zeros {
    /// Nine tenths of each.
    Smallest,
    /// Two of each four along the inputs.
    TwoOfFour,
}

impl ModuleMapper for Zeros {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if D < 2 {
            return param;
        }
        let kind = *self;
        param.map(|weight| {
            let (device, shape) = (weight.device(), weight.dims());
            let mut values: Vec<f32> = weight.into_data().iter().collect();
            match kind {
                Zeros::Smallest => {
                    let mut sizes: Vec<f32> = values.iter().map(|x| x.abs()).collect();
                    sizes.sort_by(f32::total_cmp);
                    let limit = sizes[sizes.len() * 9 / 10];
                    values
                        .iter_mut()
                        .filter(|x| x.abs() < limit)
                        .for_each(|x| *x = 0.0);
                }
                Zeros::TwoOfFour => {
                    // Inputs are the first axis of a matrix and the second of a kernel.
                    let axis = usize::from(D > 2);
                    let step: usize = shape[axis + 1..].iter().product();
                    let starts = 0..values.len();
                    let of_axis = |at: &usize| (at / step) % shape[axis];
                    for first in starts.filter(|at| of_axis(at) % 4 == 0) {
                        let mut four: Vec<usize> = (0..4)
                            .filter(|more| of_axis(&first) + more < shape[axis])
                            .map(|more| first + more * step)
                            .collect();
                        four.sort_by(|a, b| values[*b].abs().total_cmp(&values[*a].abs()));
                        four.iter().skip(2).for_each(|at| values[*at] = 0.0);
                    }
                }
            }
            Tensor::from_data(TensorData::new(values, shape), &device)
        })
    }
}
