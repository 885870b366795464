//! Whether rten's integer kernels are exact on this CPU.

use std::sync::{Arc, OnceLock};

use rten::{ThreadPool, Value};

use super::program::Program;
use crate::onnx::Attribute;
use crate::{Dimension, ElementType, Initializer, OnnxModel, OnnxNode, ValueInfo};

/// What the integer kernels of rten do on this CPU. Those of [`Backend::Own`](crate::Backend::Own) are
/// exact on all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IntegerKernels {
    /// Pairs of products of codes are added in 16 bits, where 255 · 127 + 255 · 127 does not fit:
    /// AVX2 without VNNI. Weights with codes beyond ±64 are computed as two.
    pub products_saturate: bool,
    /// Convolutions are exact: for several samples, and with padding where the zero point is not the
    /// middle. Where they are not, rten's convolutions compute in floats.
    pub exact_convolutions: bool,
}

/// Measured once in a process, with products and convolutions whose results are known.
pub fn integer_kernels() -> IntegerKernels {
    static KERNELS: OnceLock<IntegerKernels> = OnceLock::new();
    let measure = || {
        let product = product().unwrap_or_default();
        let convolution = convolution().unwrap_or_default();
        IntegerKernels {
            products_saturate: product != vec![TERMS as i32 * 255 * 127; ROWS * COLUMNS],
            exact_convolutions: convolution == convolution_by_hand(),
        }
    };
    // On a thread of its own: one of rayon's that waits for rten's pool may take on another task, which comes
    // by here, too, and waits for itself.
    *KERNELS.get_or_init(|| {
        let measured = std::thread::scope(|scope| scope.spawn(measure).join());
        measured.unwrap_or(IntegerKernels {
            products_saturate: true,
            exact_convolutions: false,
        })
    })
}

const ROWS: usize = 8;
const TERMS: usize = 32;
const COLUMNS: usize = 32;

/// Rows of 255 times columns of 127.
fn product() -> Option<Vec<i32>> {
    let weight = vec![127; TERMS * COLUMNS];
    let shapes = [&[ROWS, TERMS][..], &[TERMS, COLUMNS], &[ROWS, COLUMNS]];
    run(
        "MatMulInteger",
        shapes,
        vec![255; ROWS * TERMS],
        weight,
        vec![],
    )
}

const BATCH: usize = 2;
const CHANNELS: usize = 3;
const SIDE: usize = 5;
const ZERO: i32 = 9;

/// A 3 × 3 convolution of so many channels to as many, with padding; codes between ±20.
fn convolution() -> Option<Vec<i32>> {
    let image = [BATCH, CHANNELS, SIDE, SIDE];
    let kernel = [CHANNELS, CHANNELS, 3, 3];
    let pads = vec![Attribute::Ints("pads", vec![1; 4])];
    let x = (0..image.iter().product()).map(pixel).collect();
    let weight = (0..kernel.iter().product()).map(code).collect();
    run("ConvInteger", [&image, &kernel, &image], x, weight, pads)
}

fn pixel(index: usize) -> u8 {
    (index * 89 % 251) as u8
}

fn code(index: usize) -> i8 {
    (index * 7 % 41) as i8 - 20
}

fn convolution_by_hand() -> Vec<i32> {
    let mut sums = Vec::new();
    for index in 0..BATCH * CHANNELS * SIDE * SIDE {
        let (y, x) = (index / SIDE % SIDE, index % SIDE);
        let (sample, out) = (
            index / (SIDE * SIDE * CHANNELS),
            index / (SIDE * SIDE) % CHANNELS,
        );
        let taps = (0..CHANNELS * 9).map(|tap| {
            let (row, column) = (y + tap / 3 % 3, x + tap % 3);
            let inside = (1..=SIDE).contains(&row) && (1..=SIDE).contains(&column);
            let plane = sample * CHANNELS + tap / 9;
            match inside {
                // What is padded stands for 0.
                false => 0,
                true => {
                    let at = (plane * SIDE + row - 1) * SIDE + column - 1;
                    (i32::from(pixel(at)) - ZERO) * i32::from(code(out * CHANNELS * 9 + tap))
                }
            }
        });
        sums.push(taps.sum());
    }
    sums
}

/// The sums of an operator, of codes with the zero point `ZERO` for a convolution and 0 for a
/// product; shapes of input, weight and output.
fn run(
    operator: &'static str,
    [input, kernel, output]: [&[usize]; 3],
    x: Vec<u8>,
    weight: Vec<i8>,
    attributes: Vec<Attribute>,
) -> Option<Vec<i32>> {
    let zero = if attributes.is_empty() { 0 } else { ZERO };
    let constant = |name: &str, element, shape: &[usize], bytes| Initializer {
        name: name.into(),
        path: name.into(),
        element,
        shape: shape.to_vec(),
        bytes,
    };
    let bytes = weight.into_iter().map(|code| code as u8).collect();
    let model = OnnxModel {
        nodes: vec![OnnxNode {
            name: "product".into(),
            operator,
            domain: "",
            inputs: vec!["x".into(), "weight".into(), "zero".into()],
            outputs: vec!["y".into()],
            attributes,
        }],
        initializers: vec![
            constant("weight", ElementType::I8, kernel, bytes),
            constant("zero", ElementType::U8, &[], vec![zero as u8]),
        ],
        inputs: vec![value("x", ElementType::U8, input)],
        outputs: vec![value("y", ElementType::I32, output)],
    };
    let bytes = model.to_bytes().ok()?;
    let program = Program::load(bytes, &model, Arc::new(ThreadPool::with_num_threads(1))).ok()?;
    let x = Value::from_shape(input, x).ok()?;
    match program.run(vec![x]).ok()?.pop()? {
        Value::Int32Tensor(y) => Some(y.into_data()),
        _ => None,
    }
}

fn value(name: &str, element: ElementType, shape: &[usize]) -> ValueInfo {
    ValueInfo {
        name: name.into(),
        element,
        shape: shape.iter().map(|size| Dimension::Fixed(*size)).collect(),
    }
}
