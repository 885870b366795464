//! Labelled images: the embedded 8×8 digits, or MNIST from a folder.

use std::io::Read;
use std::path::Path;

use burn::tensor::{Device, Int, Tensor, TensorData};
use flate2::read::GzDecoder;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use super::idx::{self, IdxError};

/// 1,797 real digits with pixels 0..16; see `assets/DIGITS-LICENSE.md`.
const DIGITS: &[u8] = include_bytes!("../../assets/digits.csv.gz");
/// Size of the test set of the digits.
const DIGITS_TEST: usize = 360;
/// Seed of the split. The file is ordered by writer: its last rows alone would be a test on unseen
/// writers, which is another and harder task.
const DIGITS_SPLIT_SEED: u64 = 0;

/// Images with their labels; pixels are in 0..1 unless they were normalized.
#[derive(Debug, Clone)]
pub(crate) struct Images {
    pixels: Vec<f32>,
    labels: Vec<i64>,
    side: usize,
    /// A black pixel, for each channel.
    black: Vec<f32>,
    augmented: bool,
}

/// A training set and a test set.
#[derive(Debug, Clone)]
pub(crate) struct ImageSet {
    pub(crate) name: &'static str,
    pub(crate) train: Images,
    pub(crate) test: Images,
}

/// Images `[batch, channels, side, side]` and labels `[batch]`.
#[derive(Debug, Clone)]
pub(crate) struct Batch {
    pub(crate) images: Tensor<4>,
    pub(crate) labels: Tensor<1, Int>,
}

impl ImageSet {
    /// MNIST from `dir`, or without one the digits that are part of the binary.
    pub(crate) fn load(dir: Option<&Path>) -> Result<Self, IdxError> {
        match dir {
            Some(dir) => {
                let (train, test) = (mnist(dir, "train")?, mnist(dir, "t10k")?);
                match train.side == test.side {
                    true => Ok(Self {
                        name: "MNIST",
                        train,
                        test,
                    }),
                    false => Err(IdxError::Sides {
                        dir: dir.to_path_buf(),
                        train: train.side,
                        test: test.side,
                    }),
                }
            }
            None => Ok(Self::digits()),
        }
    }

    /// With pixels (x − mean) / deviation, one number for each channel.
    pub(crate) fn normalized_as(self, mean: &[f32], deviation: &[f32]) -> Self {
        Self {
            train: self.train.normalized(mean, deviation),
            test: self.test.normalized(mean, deviation),
            ..self
        }
    }

    /// With pixels as the checkpoints of MLPNet were trained on.
    pub(crate) fn normalized_as_mnist(self) -> Self {
        self.normalized_as(&[0.1307], &[0.3081])
    }

    /// With pixels as the checkpoints of ResNet20 were trained on.
    pub(crate) fn normalized_as_cifar10(self) -> Self {
        self.normalized_as(&[0.4914, 0.4822, 0.4465], &[0.2023, 0.1994, 0.2010])
    }

    /// The embedded digits: 1,437 to train and 360 to test, the same split whatever the seed.
    pub(crate) fn digits() -> Self {
        let mut csv = String::new();
        GzDecoder::new(DIGITS)
            .read_to_string(&mut csv)
            .expect("the embedded file is valid");
        let mut pixels = Vec::new();
        let mut labels = Vec::new();
        for row in csv.lines().skip(1) {
            let mut numbers = row
                .split(',')
                .map(|number| number.parse::<u8>().expect("the embedded file is valid"));
            pixels.extend(
                numbers
                    .by_ref()
                    .take(64)
                    .map(|pixel| f32::from(pixel) / 16.0),
            );
            labels.extend(numbers.map(i64::from));
        }
        let all = Images::new(pixels, labels, 1, 8);
        let order = all.order(DIGITS_SPLIT_SEED);
        let (train, test) = order.split_at(all.len() - DIGITS_TEST);
        Self {
            name: "digits",
            train: all.select(train),
            test: all.select(test),
        }
    }
}

fn mnist(dir: &Path, part: &str) -> Result<Images, IdxError> {
    let (pixels, [n, height, width]) = idx::read_images(dir, &format!("{part}-images-idx3-ubyte"))?;
    let labels = idx::read_labels(dir, &format!("{part}-labels-idx1-ubyte"))?;
    if n != labels.len() || n == 0 {
        return Err(IdxError::Counts {
            dir: dir.to_path_buf(),
            images: n,
            labels: labels.len(),
        });
    }
    if height != width || height == 0 || height % 4 != 0 {
        return Err(IdxError::Shape {
            dir: dir.to_path_buf(),
            height,
            width,
        });
    }
    let pixels = pixels.iter().map(|pixel| f32::from(*pixel) / 255.0);
    let labels = labels.iter().map(|label| i64::from(*label));
    Ok(Images::new(pixels.collect(), labels.collect(), 1, height))
}

impl Images {
    /// Pixels `[n, channels, side, side]`.
    pub(crate) fn new(pixels: Vec<f32>, labels: Vec<i64>, channels: usize, side: usize) -> Self {
        Self {
            pixels,
            labels,
            side,
            black: vec![0.0; channels],
            augmented: false,
        }
    }

    fn channels(&self) -> usize {
        self.black.len()
    }

    /// Shifts and scales every channel to (pixel − mean) / deviation.
    pub(crate) fn normalized(mut self, mean: &[f32], deviation: &[f32]) -> Self {
        let area = self.side * self.side;
        for (index, plane) in self.pixels.chunks_exact_mut(area).enumerate() {
            let channel = index % self.black.len();
            for pixel in plane {
                *pixel = (*pixel - mean[channel]) / deviation[channel];
            }
        }
        for (channel, black) in self.black.iter_mut().enumerate() {
            *black = (*black - mean[channel]) / deviation[channel];
        }
        self
    }

    /// With pixels from 0 to 255, as the files have them.
    pub(crate) fn in_bytes(mut self) -> Self {
        for pixel in &mut self.pixels {
            *pixel = (*pixel * 255.0).round();
        }
        self
    }

    /// `[n, channels, side, side]`
    pub(crate) fn pixels(&self) -> &[f32] {
        &self.pixels
    }

    pub(crate) fn labels(&self) -> &[i64] {
        &self.labels
    }

    /// From now on shuffled images are moved by up to 4 pixels and mirrored, at random.
    pub(crate) fn augmented(mut self) -> Self {
        self.augmented = true;
        self
    }

    pub(crate) fn len(&self) -> usize {
        self.labels.len()
    }

    /// Height and width of an image [pixels].
    pub(crate) fn side(&self) -> usize {
        self.side
    }

    /// The first `n` images, or all there are.
    pub(crate) fn take(&self, n: usize) -> Self {
        let first: Vec<usize> = (0..n.min(self.len())).collect();
        self.select(&first)
    }

    /// The first images, and the last `share` of them (0 to 1).
    pub(crate) fn split(&self, share: f64) -> (Self, Self) {
        let last = (share * self.len() as f64).round() as usize;
        let order: Vec<usize> = (0..self.len()).collect();
        let (first, last) = order.split_at(self.len() - last);
        (self.select(first), self.select(last))
    }

    fn select(&self, indices: &[usize]) -> Self {
        let size = self.channels() * self.side * self.side;
        Self {
            pixels: indices
                .iter()
                .flat_map(|index| &self.pixels[index * size..(index + 1) * size])
                .copied()
                .collect(),
            labels: indices.iter().map(|index| self.labels[*index]).collect(),
            black: self.black.clone(),
            ..*self
        }
    }

    /// Every image moved by up to 4 pixels, black where nothing was, and mirrored or not.
    fn jittered(mut self, rng: &mut StdRng) -> Self {
        let side = self.side as isize;
        let size = self.channels() * self.side * self.side;
        let mut moved = Vec::with_capacity(self.pixels.len());
        while moved.len() < self.pixels.len() {
            for black in &self.black {
                moved.extend(std::iter::repeat_n(*black, self.side * self.side));
            }
        }
        for (old, new) in self
            .pixels
            .chunks_exact(size)
            .zip(moved.chunks_exact_mut(size))
        {
            let (down, right) = (
                rng.random_range(-4i64..=4) as isize,
                rng.random_range(-4i64..=4) as isize,
            );
            let mirrored = rng.random::<bool>();
            for (index, pixel) in new.iter_mut().enumerate() {
                let index = index as isize;
                let (row, column) = (index / side % side, index % side);
                let column = if mirrored { side - 1 - column } else { column };
                let (from_row, from_column) = (row + down, column + right);
                if (0..side).contains(&from_row) && (0..side).contains(&from_column) {
                    let plane = index / (side * side) * side * side;
                    *pixel = old[(plane + from_row * side + from_column) as usize];
                }
            }
        }
        self.pixels = moved;
        self
    }

    /// Every image with its label, for loaders that make their own batches.
    pub(crate) fn items(&self) -> Vec<(Vec<f32>, i64)> {
        let size = self.channels() * self.side * self.side;
        let pixels = self.pixels.chunks_exact(size).map(<[f32]>::to_vec);
        pixels.zip(self.labels.iter().copied()).collect()
    }

    fn order(&self, seed: u64) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.len()).collect();
        order.shuffle(&mut StdRng::seed_from_u64(seed));
        order
    }

    /// The images in the order of `seed`, in batches; the last may be smaller.
    pub(crate) fn shuffled(
        &self,
        seed: u64,
        batch_size: usize,
        device: &Device,
    ) -> impl Iterator<Item = Batch> {
        let rng = self.augmented.then(|| StdRng::seed_from_u64(!seed));
        self.batches(self.order(seed), batch_size, device, rng)
    }

    /// The images [`shuffled`](Self::shuffled) again and again, each time in another order.
    pub(crate) fn endless(
        &self,
        seed: u64,
        batch_size: usize,
        device: &Device,
    ) -> impl Iterator<Item = Batch> {
        (0..).flat_map(move |pass: u64| {
            let seed = seed.wrapping_mul(1000).wrapping_add(pass);
            self.shuffled(seed, batch_size, device)
        })
    }

    /// The images in their order, in batches; the last may be smaller.
    pub(crate) fn ordered(
        &self,
        batch_size: usize,
        device: &Device,
    ) -> impl Iterator<Item = Batch> {
        self.batches((0..self.len()).collect(), batch_size, device, None)
    }

    fn batches(
        &self,
        order: Vec<usize>,
        batch_size: usize,
        device: &Device,
        mut jitter: Option<StdRng>,
    ) -> impl Iterator<Item = Batch> {
        (0..order.len()).step_by(batch_size).map(move |from| {
            let batch = self.select(&order[from..(from + batch_size).min(order.len())]);
            let batch = match &mut jitter {
                Some(rng) => batch.jittered(rng),
                None => batch,
            };
            let n = batch.len();
            let shape = [n, self.channels(), self.side, self.side];
            Batch {
                images: Tensor::from_data(TensorData::new(batch.pixels, shape), device),
                labels: Tensor::from_data(TensorData::new(batch.labels, [n]), device),
            }
        })
    }
}

/// Share of `images` that `forward` gives the right label [%]; logits are `[batch, 10]`.
pub(crate) fn accuracy(
    images: &Images,
    device: &Device,
    forward: impl Fn(Tensor<4>) -> Tensor<2>,
) -> f64 {
    let correct: i64 = images
        .ordered(256, device)
        .map(|batch| {
            let predicted = forward(batch.images).argmax(1).flatten::<1>(0, 1);
            predicted
                .equal(batch.labels)
                .int()
                .sum()
                .into_scalar::<i64>()
        })
        .sum();
    100.0 * correct as f64 / images.len() as f64
}
