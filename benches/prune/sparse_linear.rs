//! Sparse against dense inference of a linear layer on the CPU.

use std::hint::black_box;
use std::time::Instant;

use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::prune::SparseLinear;
use comfy_table::Table;
use comfy_table::presets::NOTHING;

const SIZES: [[usize; 2]; 4] = [[256, 256], [784, 300], [1024, 1024], [4096, 1024]];
const BATCHES: [usize; 5] = [1, 4, 16, 64, 256];
const SPARSITIES: [f64; 6] = [0.5, 0.7, 0.8, 0.9, 0.95, 0.98];

/// Prints microseconds of a dense forward pass on flex, and how many times faster the sparse one
/// is at each sparsity. The fastest of rounds that take turns: what else the machine does only adds.
pub(crate) fn sparse_linear() {
    let device = Device::flex();
    let mut table = Table::new();
    let mut header = vec!["layer".to_string(), "batch".into(), "dense µs".into()];
    header.extend(SPARSITIES.map(|sparsity| format!("at {sparsity}")));
    table.load_style(NOTHING).set_header(header);
    for size in SIZES {
        let layers: Vec<Linear> = SPARSITIES
            .map(|sparsity| pruned(size, sparsity, &device))
            .into();
        let sparse: Vec<SparseLinear> = layers
            .iter()
            .map(|layer| SparseLinear::from_linear(layer).expect("flex can be read"))
            .collect();
        for batch in BATCHES {
            let x = TensorData::new(numbers(batch * size[0]), [batch, size[0]]);
            let x = Tensor::<2>::from_data(x, &device);
            let rounds = (400_000_000 / (batch * size[0] * size[1])).clamp(15, 300);
            let mut times = vec![Vec::new(); SPARSITIES.len() + 1];
            for _ in 0..rounds {
                times[0].push(seconds(|| layers[0].forward(x.clone())));
                for (at, layer) in sparse.iter().enumerate() {
                    let forward = || layer.forward(x.clone()).expect("the shapes fit");
                    times[at + 1].push(seconds(forward));
                }
            }
            let seconds_of: Vec<f64> = times.into_iter().map(fastest).collect();
            let mut row = vec![
                format!("{}x{}", size[0], size[1]),
                batch.to_string(),
                format!("{:.1}", seconds_of[0] * 1e6),
            ];
            row.extend(
                seconds_of[1..]
                    .iter()
                    .map(|time| format!("{:.2}", seconds_of[0] / time)),
            );
            table.add_row(row);
        }
    }
    println!("{table}");
}

fn pruned([inputs, outputs]: [usize; 2], sparsity: f64, device: &Device) -> Linear {
    // The fractional parts of multiples of the golden ratio spread evenly.
    let keep = |at: usize| (at as f64 * 0.618_033_988_749_895).fract() >= sparsity;
    let weights = numbers(inputs * outputs)
        .into_iter()
        .enumerate()
        .map(|(at, weight)| if keep(at) { weight } else { 0.0 })
        .collect();
    let weights = TensorData::new::<f32, _>(weights, [inputs, outputs]);
    let mut linear = LinearConfig::new(inputs, outputs).init(device);
    linear.weight = Param::from_data(weights, device);
    linear
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count)
        .map(|at| ((at * 7919 % 1009) as f32 + 1.0) / 1009.0 - 0.5)
        .collect()
}

fn seconds<T>(run: impl Fn() -> T) -> f64 {
    let start = Instant::now();
    black_box(run());
    start.elapsed().as_secs_f64()
}

fn fastest(times: Vec<f64>) -> f64 {
    times.into_iter().fold(f64::INFINITY, f64::min)
}
