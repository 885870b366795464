//! The table of all modules, and its text.

use std::marker::PhantomData;

use burn::module::{Module, ModuleDisplay};
use burn::tensor::{Device, Tensor};

use crate::activations::activations;
use crate::entry::{Case, Entry, Way};
use crate::layers::layers;
use crate::losses::losses;
use crate::support::tensor;
use crate::unedited::range_in_region;

/// Every module of burn-nn 0.22.1.
pub(crate) fn table() -> Vec<Entry> {
    let mut table = layers();
    table.extend(activations());
    table.extend(losses());
    table
}

/// A layer in a regression: the squared distance to fixed targets is its loss.
pub(crate) fn layer<M: Module + ModuleDisplay + 'static>(
    name: &'static str,
    way: Way,
    roundings: u32,
    note: &'static str,
    build: impl Fn(&Device) -> M + 'static,
    forward: impl Fn(&M, Tensor<2>) -> Tensor<2> + 'static,
) -> Entry {
    Entry {
        name,
        way,
        note,
        roundings,
        random: false,
        no_backward: &[],
        subject: Box::new(Case {
            way,
            build,
            forward,
            loss: squared_error,
            layer: PhantomData,
        }),
    }
}

impl Entry {
    pub(crate) fn random(self) -> Self {
        Self {
            random: true,
            ..self
        }
    }

    pub(crate) fn no_backward_on(self, devices: &'static [&'static str]) -> Self {
        Self {
            no_backward: devices,
            ..self
        }
    }
}

impl Way {
    fn text(self) -> &'static str {
        match self {
            Way::WorksAsIs => "works as is",
            Way::KeptInFp32CalledInRegion => "kept in F32 by `prepare`; call it in a region",
            Way::CalledInRegion => "call it in a region",
            Way::OutsideInFp32 => "outside of `Autocast::forward`, in F32",
        }
    }
}

/// The table as `amp/MODULES.md` has it.
pub(crate) fn text(table: &[Entry]) -> String {
    let mut text = String::from(INTRODUCTION);
    for entry in table {
        let (name, way, note) = (entry.name, entry.way.text(), entry.note);
        let range = match range_in_region(entry) {
            None => "".into(),
            Some(30_000.0) => "30,000".into(),
            Some(magnitude) => format!("**{magnitude}**"),
        };
        text += &format!("| {name} | {way} | {range} | {note} |\n");
    }
    text
}

const INTRODUCTION: &str = "\
# Which modules go through AMP, and how

With `Autocast::run` all modules of `burn-nn` 0.22.1 go as they are, unedited, and the table below
is not needed: norms, softmax, activations with exponentials or powers, distances, divisions, sums
and losses run in F32, so that outputs and gradients are right for activations of 1 to 30,000, as far
as the bound of rounding goes. Two cannot be recorded: `PoissonNllLoss`, which looks at its targets, and
`PositionWiseFeedForward` with `SwiGlu` or `PRelu` inside, whose parameters Burn's modules do not see; nor
can `CTCLoss` in a build with debug assertions, in which it reads its lengths.

In an autocast region (`AutocastConfig::prepare`, `Autocast::forward`) the dtype of an operation is
that of its operands:

- *works as is*: its parameters are cast and it computes in half precision;
- *kept in F32 by `prepare`; call it in a region*: Burn cannot run it in half precision, because it
  mixes in F32 state. `AutocastConfig::prepare` leaves its parameters in F32, and its call goes
  into `full_precision`;
- *call it in a region*: it has F32 constants that `prepare` cannot see, and its call goes into
  `full_precision`;
- *outside of `Autocast::forward`, in F32*: losses take the F32 output of the region. In F16 a
  scaled loss would be infinite.

Without its region such a module mixes dtypes. Burn's CPU backends panic then; a GPU backend may
compute wrong numbers without a word.

A convolution adds up many terms, those of all positions of a batch for the gradient of a weight. Burn
does that in half precision itself, on flex in F16 and, where nothing is tuned, on GPUs, and there the sum
stands still: in F16 at 2,048 equal terms, in BF16 at 256. In a region those gradients are too small, and
`AutocastConfig::prepare` warns. GPUs average and interpolate so, too: the sum of a window may be infinite,
and the gradient of what was enlarged too small. `Autocast::run` adds up in F32 on operands in half.

*Range* is the largest of the magnitudes 1, 10, 40, 100, 1,000 and 30,000 of its input up to which the
outputs and gradients of a module are known to be right in an F16 region (measured on flex): they are
within the bound of rounding. Where it is less than 30,000, larger activations need `full_precision`, BF16, or
`Autocast::run`. A range also ends where the bound is half of the gradient or more, and says nothing
any more. That is so for attention and gates, whose products go into exponentials: the larger they
are, the more a rounding of them counts, on every way in half precision, and from 1,000 on they may be
infinite in F16. Beyond the bound nothing is known of them, and `full_precision` alone is safe.

This file is written by a test, which holds every line against measurements: on flex in F16 and
BF16, on wgpu in F16 and on ndarray with both emulated, outputs and gradients are within rounding of
FP32, gradients are F32, and an AdamW step lowers the loss; `Autocast::run` on the same devices
at all these magnitudes where there is a bound, which for attention, gates and recurrent layers ends
between 1 and 40 in F16, and at 1 or before in BF16. Modules that draw random numbers are compared in
their inference form, and trained in the other.

| module | way through a region | range in F16 | note |
|---|---|---|---|
";

pub(crate) fn squared_error(y: Tensor<2>) -> Tensor<1> {
    let target = tensor(2, y.dims(), &y.device());
    (y - target).square().mean()
}

/// A tensor of any rank as one row.
pub(crate) fn flat<const D: usize>(x: Tensor<D>) -> Tensor<2> {
    let count = x.shape().num_elements();
    x.reshape([1, count])
}
