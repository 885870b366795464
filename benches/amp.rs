//! FP32 against AMP: time of a training step, the scaler's share of it, and bytes held.
//!
//! `cargo bench --bench amp -- --device flex --json STEM`
//!
//! All variants of a network run interleaved in one process; times and ratios are medians. "held" is
//! what is allocated between forward and backward pass, of that in F32, and of the unedited model in
//! megabytes; "bytes" is what the audit says of it, weights included.
//!
//! `--overheads` measures instead what is beside the operations: see `amp/overheads.rs`.

#[path = "support/mod.rs"]
mod harness;
#[path = "amp/overheads.rs"]
mod overheads;
#[path = "../examples/support/mod.rs"]
mod support;

use std::error::Error;
use std::process::ExitCode;

use burn::module::Module;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use burn_lean::amp::{
    AmpError, Autocast, AutocastConfig, DynamicLossScale, Fallback, GradScaler, GradScalerConfig,
    LossScale, Speculative, audit, audit::Memory, supported_dtypes,
};
use clap::Parser;
use harness::{ConvNet, Turns, Variant, interleave, warm_up};
use peak_alloc::PeakAlloc;
use support::{Cell, DeviceName, Dtype, Table};

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Benchmark of mixed precision.
#[derive(Parser)]
struct Arguments {
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceName::Flex)]
    device: DeviceName,
    /// Sizes for a GPU instead of a CPU.
    #[arg(long)]
    large: bool,
    /// Computes activations again in the backward pass (gradient checkpointing), in every row.
    #[arg(long)]
    checkpointing: bool,
    /// Samples of each variant; 0 measures nothing and reports bytes only.
    #[arg(long, default_value_t = 9)]
    samples: usize,
    /// Steps in a sample.
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// Only unscaling, a weight that is used many times, and the audit.
    #[arg(long)]
    overheads: bool,
    /// Only networks whose name contains this.
    #[arg(long, default_value = "")]
    network: String,
    /// Only F32, which the others are compared with, and this.
    #[arg(long)]
    dtype: Option<Dtype>,
    /// A file for several benchmarks at once: none of them takes samples while another one still tunes or
    /// compiles kernels, or takes its own.
    #[arg(long)]
    turns: Option<std::path::PathBuf>,
    /// Also write each table to STEM-NETWORK.json.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    support::exit(run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let device = arguments.device.open()?.autodiff();
    let device = match arguments.checkpointing {
        true => device.gradient_checkpointing(),
        false => device,
    };
    if arguments.overheads {
        let table = overheads::overheads(&device, arguments.samples)?;
        return Ok(table.publish(arguments.json.as_deref())?);
    }
    benchmark::<Mlp>(arguments, &device)?;
    benchmark::<ConvNet>(arguments, &device)?;
    benchmark::<Transformer>(arguments, &device)
}

/// The table of one network.
fn table(network: &str, device: &Device) -> Table {
    Table::new(
        format!("training step of the {network} with AdamW on {device:?}"),
        &[
            "network",
            "dtype",
            "step ms",
            "time of F32",
            "scaler %",
            "no-wait %",
            "unedited / region",
            "cached / region",
            "unedited / F32",
            "bytes",
            "bytes of F32",
            "held by region",
            "held unedited",
            "held MB",
        ],
    )
}

/// A network with an input of its own, both of two sizes.
trait Network: Module + Send + 'static {
    const NAME: &'static str;
    fn new(large: bool, device: &Device) -> Self;
    /// Random input, all ranks written as four.
    fn input(large: bool, device: &Device) -> Tensor<4>;
    fn forward(&self, input: Tensor<4>) -> Tensor<2>;

    /// In a region.
    fn loss(&self, autocast: &Autocast, input: Tensor<4>) -> Tensor<1> {
        autocast
            .forward(input, |input| self.forward(input))
            .square()
            .mean()
    }

    /// Operation by operation.
    fn unedited_loss(&self, autocast: &Autocast, input: Tensor<4>) -> Result<Tensor<1>, AmpError> {
        autocast.run(self, input, |network, input| {
            network.forward(input).square().mean()
        })
    }
}

/// Layers of 512, 1024, 1024 and 10 (large: 4096 throughout), batch 128 (1024).
#[derive(Module, Debug)]
struct Mlp {
    layers: Vec<Linear>,
}

impl Network for Mlp {
    const NAME: &'static str = "mlp";

    fn new(large: bool, device: &Device) -> Self {
        let sizes = match large {
            true => [4096, 4096, 4096, 4096],
            false => [512, 1024, 1024, 10],
        };
        let linear = |pair: &[usize]| LinearConfig::new(pair[0], pair[1]).init(device);
        Self {
            layers: sizes.windows(2).map(linear).collect(),
        }
    }

    fn input(large: bool, device: &Device) -> Tensor<4> {
        let shape = match large {
            true => [1, 1, 1024, 4096],
            false => [1, 1, 128, 512],
        };
        Tensor::random(shape, Distribution::Default, device)
    }

    fn forward(&self, input: Tensor<4>) -> Tensor<2> {
        let x = input.flatten::<2>(0, 2);
        self.layers
            .iter()
            .fold(x, |x, layer| relu(layer.forward(x)))
    }
}

impl Network for ConvNet {
    const NAME: &'static str = "conv net";

    fn new(large: bool, device: &Device) -> Self {
        Self::new(large, device)
    }

    fn input(large: bool, device: &Device) -> Tensor<4> {
        Self::input(large, device)
    }

    fn forward(&self, input: Tensor<4>) -> Tensor<2> {
        self.forward(input)
    }
}

/// One encoder block, width 128 with 4 heads and 512 inside (large: 1024, 16 and 4096), on 16
/// (16) sequences of 64 (512) positions.
#[derive(Module, Debug)]
struct Transformer {
    encoder: TransformerEncoder,
}

impl Network for Transformer {
    const NAME: &'static str = "transformer block";

    fn new(large: bool, device: &Device) -> Self {
        let (width, inside, heads) = if large {
            (1024, 4096, 16)
        } else {
            (128, 512, 4)
        };
        Self {
            encoder: TransformerEncoderConfig::new(width, inside, heads, 1)
                .with_dropout(0.0)
                .init(device),
        }
    }

    fn input(large: bool, device: &Device) -> Tensor<4> {
        let shape = match large {
            true => [1, 16, 512, 1024],
            false => [1, 16, 64, 128],
        };
        Tensor::random(shape, Distribution::Default, device)
    }

    fn forward(&self, input: Tensor<4>) -> Tensor<2> {
        let x = input.squeeze_dim::<3>(0);
        let x = self.encoder.forward(TransformerEncoderInput::new(x));
        x.flatten(0, 1)
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// A region without a scaler.
    Off,
    /// A region with one.
    Plain,
    /// The same without waiting.
    NoWait,
    /// Recorded in each step, with a scaler.
    Unedited,
    /// Recorded once.
    Cached,
}

const WAYS: [Way; 5] = [
    Way::Off,
    Way::Plain,
    Way::NoWait,
    Way::Unedited,
    Way::Cached,
];

fn benchmark<N: Network>(arguments: &Arguments, device: &Device) -> Result<(), Box<dyn Error>> {
    if !N::NAME.contains(&arguments.network) {
        return Ok(());
    }
    let turns = arguments.turns.as_deref().map(Turns::at).transpose()?;
    let supported = supported_dtypes(&device.clone().inner());
    let mut rows = Vec::new();
    let mut variants = Vec::new();
    for dtype in [FloatDType::F32, FloatDType::F16, FloatDType::BF16] {
        // A device without BF16 has the row of F16; one without any half emulates F16.
        if !supported.contains(&dtype) && (dtype == FloatDType::BF16 || supported.len() > 1) {
            continue;
        }
        let only = arguments.dtype.map(FloatDType::from);
        let is_left_out = only.is_some_and(|only| ![FloatDType::F32, only].contains(&dtype));
        if is_left_out {
            continue;
        }
        let (model, autocast) = AutocastConfig::new(dtype)
            .with_fallback(Fallback::Emulate)
            .prepare(N::new(arguments.large, device))?;
        let input = N::input(arguments.large, device);
        let audit = audit(&model, &autocast, input, |model, autocast, input| {
            model.loss(autocast, input)
        })?;
        let held = [Way::Plain, Way::Unedited]
            .map(|way| held::<N>(arguments.large, dtype, way, device))
            .into_iter()
            .collect::<Result<Vec<_>, _>>()?;
        rows.push((support::dtype_name(&autocast), audit.memory, held));
        for way in WAYS {
            variants.push(variant::<N>(arguments.large, dtype, way, device)?);
        }
    }
    let bar = support::progress((arguments.samples + 1) * variants.len(), N::NAME);
    let (samples, steps) = (arguments.samples, arguments.steps);
    let turn = match turns {
        None => None,
        Some(turns) => {
            warm_up(&mut variants, device)?;
            Some(turns.wait()?)
        }
    };
    interleave(&mut variants, samples, steps, device, &bar)?;
    drop(turn);
    let mut table = table(N::NAME, device);
    report(N::NAME, &rows, &variants, &mut table);
    table.publish_as(arguments.json.as_deref(), &N::NAME.replace(' ', "-"))?;
    Ok(())
}

/// Bytes that a forward pass leaves for the backward pass: allocated when the loss is there, but not before.
fn held<N: Network>(
    large: bool,
    dtype: FloatDType,
    way: Way,
    device: &Device,
) -> Result<Option<u64>, Box<dyn Error>> {
    let network = N::new(large, device);
    let input = N::input(large, device);
    let autocast = Autocast::new(dtype).with_fallback(Fallback::Emulate);
    let (model, autocast) = match way {
        Way::Unedited | Way::Cached => (network, autocast.cached()),
        Way::Off | Way::Plain | Way::NoWait => AutocastConfig::new(dtype)
            .with_fallback(Fallback::Emulate)
            .prepare(network)?,
    };
    let loss = || match way {
        Way::Unedited | Way::Cached => model.unedited_loss(&autocast, input.clone()),
        Way::Off | Way::Plain | Way::NoWait => Ok(model.loss(&autocast, input.clone())),
    };
    // What is made once is made.
    drop(loss()?.backward());
    let before = in_use(device)?;
    let loss = loss()?;
    let after = in_use(device)?;
    drop(loss.backward());
    Ok(before
        .zip(after)
        .map(|(before, after)| after.saturating_sub(before)))
}

/// Bytes that tensors use: of the memory of the process, or of what a GPU's allocator has given out.
fn in_use(device: &Device) -> Result<Option<u64>, Box<dyn Error>> {
    let device = device.clone().inner();
    device.sync()?;
    if let Some(usage) = device.memory_pool_usage() {
        return Ok(Some(usage.bytes_in_use));
    }
    let name = format!("{device:?}").to_lowercase();
    let in_process = name.contains("flex") || name.contains("ndarray");
    Ok(in_process.then(|| HEAP.current_usage() as u64))
}

fn variant<N: Network>(
    large: bool,
    dtype: FloatDType,
    way: Way,
    device: &Device,
) -> Result<Variant, AmpError> {
    let network = N::new(large, device);
    let unedited = Autocast::new(dtype).with_fallback(Fallback::Emulate);
    let (model, autocast) = match way {
        Way::Unedited => (network, unedited),
        Way::Cached => (network, unedited.cached()),
        Way::Off | Way::Plain | Way::NoWait => AutocastConfig::new(dtype)
            .with_fallback(Fallback::Emulate)
            .prepare(network)?,
    };
    let input = N::input(large, device);
    let scaler = GradScalerConfig::new(match way {
        Way::Off => LossScale::None,
        // No overflow is wanted here: it would skip the optimizer, and look fast.
        _ => LossScale::Dynamic(DynamicLossScale {
            init_scale: 256.0,
            ..Default::default()
        }),
    })
    .init()?;
    let gradients = move |model: &N, scaler: &mut GradScaler| {
        let loss = match way {
            Way::Unedited | Way::Cached => model.unedited_loss(&autocast, input.clone())?,
            Way::Off | Way::Plain | Way::NoWait => model.loss(&autocast, input.clone()),
        };
        let loss = scaler.scale(loss)?;
        Ok::<_, AmpError>(GradientsParams::from_grads(loss.backward(), model))
    };
    let optim = AdamWConfig::new().init();
    Ok(match way {
        Way::NoWait => {
            let mut training = Speculative::new(model, optim, scaler);
            Variant::new(move || Ok(training.step(1e-4, &gradients)?))
        }
        _ => {
            let (mut optim, mut scaler, mut model) = (optim, scaler, Some(model));
            Variant::new(move || {
                let current = model.take().expect("the model is put back after each step");
                let grads = gradients(&current, &mut scaler)?;
                model = Some(scaler.step(&mut optim, 1e-4, current, grads)?);
                Ok(())
            })
        }
    })
}

type Row = (String, Memory, Vec<Option<u64>>);

fn report(network: &str, rows: &[Row], variants: &[Variant], table: &mut Table) {
    // F32 without a scaler is what a plain training loop costs.
    let f32_step = &variants[0];
    let f32_held = rows.first().and_then(|(_, _, held)| held[0]);
    for ((dtype, memory, held), variants) in rows.iter().zip(variants.chunks(WAYS.len())) {
        let [off, plain, no_wait, unedited, cached] = variants else {
            unreachable!("every dtype has a variant for each way");
        };
        let of_f32 = |held: Option<u64>| Some(held? as f64 / f32_held? as f64);
        let share = |of: &Variant| of.compared(off, |with, without| 100.0 * (1.0 - without / with));
        table.push([
            network.into(),
            dtype.as_str().into(),
            Cell::optional(plain.median(), 2),
            Cell::optional(plain.compared(f32_step, |amp, f32| amp / f32), 2),
            Cell::optional(share(plain), 1),
            Cell::optional(share(no_wait), 1),
            Cell::optional(unedited.compared(plain, |a, b| a / b), 2),
            Cell::optional(cached.compared(plain, |a, b| a / b), 2),
            Cell::optional(unedited.compared(f32_step, |amp, f32| amp / f32), 2),
            Cell::Integer(memory.total() as u64),
            Cell::Number(memory.ratio(), 3),
            Cell::optional(of_f32(held[0]), 3),
            Cell::optional(of_f32(held[1]), 3),
            Cell::optional(held[1].map(|bytes| bytes as f64 / 1e6), 2),
        ]);
    }
}
