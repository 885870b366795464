//! How fast the products are here: `cargo run --release -p burn-lean-kernels --example speed`.

use std::time::Instant;

use burn_lean_kernels::{
    Blocks, Epilogue, FloatMatrix, Geometry, IntegerMatrix, Rows, SparseMatrix, Storage, Windows,
};

fn time(name: &str, work: usize, mut run: impl FnMut()) {
    run();
    let mut best = f64::MAX;
    let begin = Instant::now();
    while begin.elapsed().as_secs_f64() < 0.3 {
        let start = Instant::now();
        run();
        best = best.min(start.elapsed().as_secs_f64());
    }
    let rate = work as f64 / best * 1e-9;
    println!("{name:40} {:9.3} ms {rate:8.1} G/s", best * 1e3);
}

fn main() {
    println!("{} threads", rayon::current_num_threads());
    for (terms, columns) in [(512, 512), (4096, 4096)] {
        let weights: Vec<f32> = (0..terms * columns)
            .map(|i| ((i * 7919) % 2003) as f32 / 1000.0 - 1.0)
            .collect();
        let codes: Vec<i8> = weights.iter().map(|x| (x * 127.0) as i8).collect();
        let nibbles: Vec<i8> = weights.iter().map(|x| (x * 7.0) as i8).collect();
        let sparse: Vec<f32> = (weights.iter().enumerate())
            .map(|(i, x)| if (i * 31) % 97 < 10 { *x } else { 0.0 })
            .collect();
        let f32 = FloatMatrix::new(&weights, terms, columns, Storage::F32).unwrap();
        let f16 = FloatMatrix::new(&weights, terms, columns, Storage::F16).unwrap();
        let bf16 = FloatMatrix::new(&weights, terms, columns, Storage::BF16).unwrap();
        let scales = vec![0.01; columns];
        let size = [terms, columns];
        let int4 = FloatMatrix::of_codes(&nibbles, size, 4, Blocks::new(terms, &scales)).unwrap();
        let blocks = vec![0.01; columns * terms / 32];
        let int4_32 = FloatMatrix::of_codes(&nibbles, size, 4, Blocks::new(32, &blocks)).unwrap();
        let int8 = FloatMatrix::of_codes(&codes, size, 8, Blocks::new(terms, &scales)).unwrap();
        let w8a8 = IntegerMatrix::new(&codes, terms, columns, 8).unwrap();
        let many = IntegerMatrix::for_many_rows(&codes, terms, columns).unwrap();
        let w4a8 = IntegerMatrix::new(&nibbles, terms, columns, 4).unwrap();
        let offset = Blocks::new(32, &blocks).with_offsets(&blocks);
        let int4_zero = FloatMatrix::of_codes(&nibbles, size, 4, offset).unwrap();
        let w4a8_zero = IntegerMatrix::in_blocks(&nibbles, size, 4, offset).unwrap();
        let w4a8_32 =
            IntegerMatrix::in_blocks(&nibbles, size, 4, Blocks::new(32, &blocks)).unwrap();
        let sparse = SparseMatrix::new(&sparse, terms, columns).unwrap();
        let epilogue = Epilogue::new(columns).with_scale(&scales);
        for rows in [1, 32, 256] {
            let x: Vec<f32> = (0..rows * terms).map(|i| (i % 13) as f32 - 6.0).collect();
            let q: Vec<i16> = x.iter().map(|x| *x as i16).collect();
            let mut y = vec![0.0; rows * columns];
            let work = rows * terms * columns;
            let at = |name: &str| format!("{name} {rows}x{terms}x{columns}");
            let none = Epilogue::new(columns);
            for (name, matrix) in [
                ("f32", &f32),
                ("f16", &f16),
                ("bf16", &bf16),
                ("w8", &int8),
                ("w4", &int4),
                ("w4 in 32", &int4_32),
                ("w4 in 32 with zero points", &int4_zero),
            ] {
                let left = Rows::dense(&x, terms);
                time(&at(name), work, || matrix.multiply(&left, &none, &mut y));
            }
            let left = Rows::dense(&q, terms);
            time(&at("w8a8"), work, || {
                w8a8.multiply(&left, &epilogue, &mut y)
            });
            if let Some(many) = &many {
                time(&at("w8a8 for many rows"), work, || {
                    many.multiply(&left, &epilogue, &mut y)
                });
            }
            time(&at("w4a8"), work, || {
                w4a8.multiply(&left, &epilogue, &mut y)
            });
            time(&at("w4a8 in 32"), work, || {
                w4a8_32.multiply(&left, &none, &mut y)
            });
            time(&at("w4a8 in 32 with zero points"), work, || {
                w4a8_zero.multiply(&left, &none, &mut y)
            });
            time(&at("sparse 0.9"), work, || {
                sparse.multiply(&x, &none, &mut y)
            });
        }
    }
    for (side, channels, out) in [(32, 3, 16), (32, 16, 16), (16, 32, 32), (8, 64, 64)] {
        let geometry = Geometry {
            kernel: [3, 3],
            stride: [1, 1],
            padding: [[1, 1], [1, 1]],
            dilation: [1, 1],
        };
        let shape = [1, side, side, channels];
        let count: usize = shape.iter().product();
        let codes: Vec<i16> = (0..count).map(|i| (i % 255) as i16).collect();
        let x: Vec<f32> = codes.iter().map(|code| f32::from(*code)).collect();
        let weight: Vec<i8> = (0..9 * channels * out).map(|i| (i % 100) as i8).collect();
        let floats: Vec<f32> = weight.iter().map(|code| f32::from(*code)).collect();
        let w8 = IntegerMatrix::new(&weight, 9 * channels, out, 8).unwrap();
        let f32 = FloatMatrix::new(&floats, 9 * channels, out, Storage::F32).unwrap();
        let epilogue = Epilogue::new(out).with_scale(&vec![0.01; out]);
        let mut y = vec![0.0; side * side * out];
        let work = side * side * out * channels * 9;
        let name = |kind| format!("conv {kind} {side}² {channels} to {out}");
        let windows = Windows::new(&codes, shape, geometry).unwrap();
        time(&name("w8a8"), work, || {
            w8.multiply(&windows, &epilogue, &mut y)
        });
        let windows = Windows::new(&x, shape, geometry).unwrap();
        time(&name("f32"), work, || {
            f32.multiply(&windows, &epilogue, &mut y)
        });
    }
}
