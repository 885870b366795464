//! Operations that keep less for the backward pass under rules for a half dtype: their gradients
//! against those of the formulas in F64.

use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::softmax;
use burn::tensor::{Device, Distribution, FloatDType, Tensor, TensorData};
use burn_lean::graph::{Arithmetic, Node, Precision, Rules, record};

use crate::support::{Target, each_device, gradients, numbers, tensor, values};

/// Products in half; softmax and norms in F32; everything else as it comes.
struct Mixed {
    half: FloatDType,
    arithmetic: Arithmetic,
}

impl Rules for Mixed {
    fn precision(&self, node: &Node<'_>) -> Precision {
        match node.name() {
            "matmul" => Precision::Half,
            "exp" | "sum_dim" | "div" | "mean_dim" | "sqrt" | "sum" => Precision::Full,
            _ => Precision::Follow,
        }
    }

    fn half(&self) -> FloatDType {
        self.half
    }

    fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }
}

impl Mixed {
    /// What a device does; nothing where half is emulated, which keeps what Burn keeps.
    fn on(target: &Target) -> Vec<Self> {
        let rules = |half, arithmetic| Self { half, arithmetic };
        match target.name {
            "flex" => vec![
                rules(FloatDType::F16, Arithmetic::Widened),
                rules(FloatDType::BF16, Arithmetic::Widened),
                rules(FloatDType::F16, Arithmetic::Native),
            ],
            "wgpu" | "vulkan" => vec![rules(FloatDType::F16, Arithmetic::Native)],
            "cuda" => vec![
                rules(FloatDType::F16, Arithmetic::Native),
                rules(FloatDType::BF16, Arithmetic::Native),
            ],
            _ => Vec::new(),
        }
    }

    /// The largest relative error of rounding to it.
    fn unit(&self) -> f64 {
        match self.half {
            FloatDType::F16 => 2f64.powi(-11),
            _ => 2f64.powi(-8),
        }
    }

    /// The largest absolute error of it below the normal numbers.
    fn smallest(&self) -> f64 {
        match self.half {
            FloatDType::F16 => 2f64.powi(-25),
            _ => 0.0,
        }
    }
}

fn of<const D: usize>(numbers: &[f32], shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(numbers.to_vec(), shape), device)
}

fn wide(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().map(|x| f64::from(*x)).collect()
}

fn near(found: &[f32], expected: &[f64], tolerance: impl Fn(usize) -> f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let (error, bound) = ((f64::from(*found) - expected).abs(), tolerance(index));
        assert!(
            error <= bound,
            "{what}[{index}]: {found} instead of {expected}, which is more than {bound:e} off"
        );
    }
}

fn size(numbers: &[f64]) -> f64 {
    numbers.iter().fold(0.0, |most, x| most.max(x.abs()))
}

/// A norm that a product and a sum read.
#[derive(Module, Debug)]
struct Normed {
    x: Param<Tensor<2>>,
    norm: LayerNorm,
    head: Linear,
}

const ROWS: usize = 5;
const WIDTH: usize = 24;
const EPSILON: f64 = 1e-5;

impl Normed {
    fn new(x: &[f32], bias: bool, device: &Device) -> Self {
        let mut norm = LayerNormConfig::new(WIDTH).with_bias(bias).init(device);
        let vector = |seed| of(&numbers(seed, WIDTH), [WIDTH], device);
        norm.gamma = Param::from_tensor(vector(5));
        norm.beta = norm.beta.map(|_| Param::from_tensor(vector(6)));
        let signs: Vec<f32> = numbers(9, WIDTH).iter().map(|x| x.signum()).collect();
        let mut head = LinearConfig::new(WIDTH, 1).with_bias(false).init(device);
        head.weight = Param::from_tensor(of(&signs, [WIDTH, 1], device));
        Self {
            x: Param::from_tensor(of(x, [ROWS, WIDTH], device)),
            norm,
            head,
        }
    }

    /// `Σ y ∘ w + Σ y v`.
    fn loss(&self, x: Tensor<2>, w: Tensor<2>) -> Tensor<1> {
        let y = self.norm.forward(x);
        (y.clone() * w).sum() + self.head.forward(y).sum()
    }
}

/// The gradients of x, γ and β, and what the head reads, summed over rows.
fn expected(model: &Normed, w: &[f32]) -> [Vec<f64>; 4] {
    let of = |tensor: Tensor<1>| wide(&values(tensor));
    let x = wide(&values(model.x.val()));
    let gamma = of(model.norm.gamma.val());
    let beta = model.norm.beta.as_ref();
    let beta = beta.map_or(vec![0.0; WIDTH], |beta| of(beta.val()));
    let head = wide(&values(model.head.weight.val()));
    let mut found = [
        Vec::new(),
        vec![0.0; WIDTH],
        vec![0.0; WIDTH],
        vec![0.0; WIDTH],
    ];
    for (x, w) in x.chunks(WIDTH).zip(w.chunks(WIDTH)) {
        let mean = |x: &[f64]| x.iter().sum::<f64>() / WIDTH as f64;
        let centered: Vec<f64> = x.iter().map(|one| one - mean(x)).collect();
        let squares: Vec<f64> = centered.iter().map(|x| x * x).collect();
        let deviation = (mean(&squares) + EPSILON).sqrt();
        let x: Vec<f64> = centered.iter().map(|x| x / deviation).collect();
        let g: Vec<f64> = (0..WIDTH).map(|j| f64::from(w[j]) + head[j]).collect();
        let h: Vec<f64> = (0..WIDTH).map(|j| g[j] * gamma[j]).collect();
        let along: Vec<f64> = (0..WIDTH).map(|j| h[j] * x[j]).collect();
        for j in 0..WIDTH {
            found[0].push((h[j] - mean(&h) - x[j] * mean(&along)) / deviation);
            found[1][j] += g[j] * x[j];
            found[2][j] += g[j];
            found[3][j] += x[j] * gamma[j] + beta[j];
        }
    }
    found
}

#[test]
fn a_layer_norm_keeps_its_input_and_has_its_gradients() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let w = numbers(3, ROWS * WIDTH);
        for rules in Mixed::on(target) {
            for (magnitude, offset) in [(1.0, 0.0), (40.0, 3.0), (30_000.0, 0.0), (1.0, 300.0)] {
                for (bias, frozen) in [(true, false), (false, false), (true, true)] {
                    let x = numbers(4, ROWS * WIDTH).into_iter();
                    let x: Vec<f32> = x.map(|x| magnitude * x + offset).collect();
                    let mut model = Normed::new(&x, bias, &device);
                    if frozen {
                        model.norm = model.norm.freeze();
                    }
                    let wanted = expected(&model, &w);
                    let w = of(&w, [ROWS, WIDTH], &device);
                    let loss = |model: &Normed, w| model.loss(model.x.val(), w);
                    let recording = record(&model, &w, loss).unwrap();
                    let loss = recording.execute(&model, &w, &rules).unwrap();
                    let grads = GradientsParams::from_grads(loss.backward(), &model);
                    let found = gradients(&model, grads);
                    let paths: Vec<&str> = found.iter().map(|one| one.0.as_str()).collect();
                    assert_eq!(
                        paths,
                        match (bias, frozen) {
                            (_, true) => vec!["x", "head.weight"],
                            (true, false) => vec!["x", "norm.gamma", "norm.beta", "head.weight"],
                            (false, false) => vec!["x", "norm.gamma", "head.weight"],
                        }
                    );
                    // Sums in F32; the mean takes digits of what is far from zero.
                    let exact = 1e-5 * (1.0 + f64::from(offset / magnitude));
                    for (path, _, found) in &found {
                        let (wanted, relative) = match path.as_str() {
                            "x" => (&wanted[0], exact),
                            "norm.gamma" => (&wanted[1], exact),
                            "norm.beta" => (&wanted[2], exact),
                            // Its operand is rounded.
                            _ => (&wanted[3], exact + ROWS as f64 * rules.unit()),
                        };
                        let size = size(wanted).max(1e-3);
                        near(found, wanted, |_| relative * size, path);
                    }
                }
            }
        }
    });
}

#[test]
fn a_norm_over_one_number_may_be_broadcast_to_its_scale() {
    type Scaled = (Param<Tensor<2>>, Param<Tensor<2>>, Param<Tensor<2>>);
    each_device(|target| {
        for rules in Mixed::on(target) {
            let device = target.device.clone().autodiff();
            let param = |seed, shape: [usize; 2]| {
                let count = shape.iter().product();
                Param::from_tensor(of(&numbers(seed, count), shape, &device))
            };
            let model: Scaled = (param(1, [5, 1]), param(2, [1, 3]), param(3, [1, 3]));
            let recording = record(&model, &(), |model: &Scaled, ()| {
                let (x, gamma, beta) = (model.0.val(), model.1.val(), model.2.val());
                let centered = x.clone() - x.mean_dim(1);
                let variance = (centered.clone() * centered.clone()).mean_dim(1);
                centered / (variance + EPSILON).sqrt() * gamma + beta
            });
            let y = recording.unwrap().execute(&model, &(), &rules).unwrap();
            assert_eq!(y.dims(), [5, 3]);
            // Each number is its mean.
            assert_eq!(values(y.clone()), values(model.2.val()).repeat(5));
            let grads = y.sum().backward();
            assert_eq!(values(model.1.grad(&grads).unwrap()), [0f32; 3]);
            assert_eq!(values(model.2.grad(&grads).unwrap()), [5f32; 3]);
        }
    });
}

#[test]
fn a_layer_norm_of_what_has_no_gradient_has_its_own() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let (x, w) = (numbers(4, ROWS * WIDTH), numbers(3, ROWS * WIDTH));
        for rules in Mixed::on(target) {
            let model = Normed::new(&x, true, &device);
            let wanted = expected(&model, &w);
            let given = [&x, &w].map(|numbers| of(numbers, [ROWS, WIDTH], &device));
            let given = (given[0].clone(), given[1].clone());
            let recording = record(&model, &given, |model, (x, w)| model.loss(x, w)).unwrap();
            let loss = recording.execute(&model, &given, &rules).unwrap();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let found = gradients(&model, grads);
            assert_eq!(found.len(), 3);
            for ((_, _, found), wanted) in found.iter().zip(&wanted[1..3]) {
                near(found, wanted, |_| 1e-5 * size(wanted), "of γ or β");
            }
        }
    });
}

const CLASSES: usize = 12;

/// Probabilities that a product reads, along either dimension.
#[derive(Module, Debug)]
struct Attention {
    scores: Param<Tensor<2>>,
    values: Param<Tensor<2>>,
    dropout: Dropout,
    #[module(skip)]
    axis: usize,
}

impl Attention {
    fn new(scores: &[f32], values: &[f32], axis: usize, dropout: f64, device: &Device) -> Self {
        let rows = scores.len() / CLASSES;
        let scores = of(scores, [rows, CLASSES], device);
        Self {
            scores: Param::from_tensor(match axis {
                0 => scores.transpose(),
                _ => scores,
            }),
            values: Param::from_tensor(of(values, [CLASSES, 3], device)),
            dropout: DropoutConfig::new(dropout).init(),
            axis,
        }
    }

    /// The probabilities as the product reads them, and `Σ p v ∘ w`.
    fn loss(&self, w: Tensor<2>) -> (Tensor<2>, Tensor<1>) {
        let p = self.dropout.forward(softmax(self.scores.val(), self.axis));
        let p = match self.axis {
            0 => p.transpose(),
            _ => p,
        };
        (p.clone(), (p.matmul(self.values.val()) * w).sum())
    }

    /// The gradient of the scores, and the terms whose roundings are its error; `kept` is what a
    /// dropout multiplies with.
    fn expected(&self, w: &[f32], kept: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let scores = match self.axis {
            0 => self.scores.val().transpose(),
            _ => self.scores.val(),
        };
        let (scores, v) = (wide(&values(scores)), wide(&values(self.values.val())));
        let (mut gradient, mut terms) = (Vec::new(), Vec::new());
        for (row, scores) in scores.chunks(CLASSES).enumerate() {
            let most = scores.iter().copied().fold(f64::MIN, f64::max);
            let exp: Vec<f64> = scores.iter().map(|x| (x - most).exp()).collect();
            let sum: f64 = exp.iter().sum();
            let of_class = |j: usize| {
                let products = (0..3).map(|k| v[3 * j + k] * f64::from(w[3 * row + k]));
                products.sum::<f64>() * kept[row * CLASSES + j]
            };
            let g: Vec<f64> = (0..CLASSES).map(of_class).collect();
            let along: f64 = (0..CLASSES).map(|j| exp[j] / sum * g[j]).sum();
            let size: f64 = (0..CLASSES).map(|j| exp[j] / sum * g[j].abs()).sum();
            for j in 0..CLASSES {
                let p = exp[j] / sum;
                gradient.push(p * (g[j] - along));
                terms.push(p * (g[j].abs() + size));
            }
        }
        (gradient, terms)
    }
}

/// Runs it without the probabilities among the results, so that only the product reads them.
fn gradient_of_scores(model: &Attention, w: &Tensor<2>, rules: &Mixed) -> Vec<f32> {
    let recording = record(model, w, |model, w| model.loss(w).1).unwrap();
    let loss = recording.execute(model, w, rules).unwrap();
    of_scores(model, loss)
}

fn of_scores(model: &Attention, loss: Tensor<1>) -> Vec<f32> {
    let grads = loss.backward();
    let grad = model.scores.val().grad(&grads).unwrap();
    values(match model.axis {
        0 => grad.transpose(),
        _ => grad,
    })
}

/// Numbers that both half dtypes have.
fn coarse(seed: u64, count: usize) -> Vec<f32> {
    let numbers = numbers(seed, count).into_iter();
    numbers.map(|x| (16.0 * x).round() / 16.0).collect()
}

#[test]
fn the_gradient_of_a_softmax_comes_from_its_rounded_results() {
    const ROWS: usize = 4;
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let (v, w) = (coarse(2, CLASSES * 3), coarse(3, ROWS * 3));
        for rules in Mixed::on(target) {
            for (magnitude, axis) in [(1.0, 1), (1.0, 0), (10.0, 1), (100.0, 0), (30_000.0, 1)] {
                let scores = numbers(1, ROWS * CLASSES).into_iter();
                let scores: Vec<f32> = scores.map(|x| magnitude * x).collect();
                let model = Attention::new(&scores, &v, axis, 0.0, &device);
                let found = gradient_of_scores(&model, &of(&w, [ROWS, 3], &device), &rules);
                let (wanted, terms) = model.expected(&w, &[1.0; ROWS * CLASSES]);
                // Rounded: the gradient of the results, each of them, their sum and its parts.
                let bound = |j: usize| {
                    // An exponent is as exact as F32 has its scores.
                    let exponent = 4.0 * f64::from(magnitude * f32::EPSILON);
                    (6.0 * rules.unit() + exponent) * terms[j]
                        + 6.0 * rules.smallest()
                        + f64::from(f32::MIN_POSITIVE)
                };
                near(&found, &wanted, bound, &format!("at {magnitude}"));
            }
        }
    });
}

#[test]
fn a_gradient_that_is_the_same_for_all_probabilities_has_no_effect() {
    const ROWS: usize = 4;
    each_device(|target| {
        let device = target.device.clone().autodiff();
        for rules in Mixed::on(target) {
            let scores: Vec<f32> = numbers(1, ROWS * CLASSES).iter().map(|x| 3.0 * x).collect();
            let model = Attention::new(&scores, &[1.0; CLASSES * 3], 1, 0.0, &device);
            let w = of(&[1.0; ROWS * 3], [ROWS, 3], &device);
            let found = gradient_of_scores(&model, &w, &rules);
            near(&found, &[0.0; ROWS * CLASSES], |_| 2e-6, "the gradient");
        }
    });
}

#[test]
fn a_dropout_keeps_its_mask() {
    const ROWS: usize = 20;
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let (v, w) = (coarse(2, CLASSES * 3), coarse(3, ROWS * 3));
        let scores = numbers(1, ROWS * CLASSES);
        for rules in Mixed::on(target) {
            let model = Attention::new(&scores, &v, 1, 0.5, &device);
            let given = of(&w, [ROWS, 3], &device);
            let recording = record(&model, &given, |model, w| model.loss(w)).unwrap();
            let (p, loss) = recording.execute(&model, &given, &rules).unwrap();
            let kept: Vec<f64> = values(p)
                .iter()
                .map(|p| if *p == 0.0 { 0.0 } else { 2.0 })
                .collect();
            let share = kept.iter().sum::<f64>() / (2 * kept.len()) as f64;
            assert!((share - 0.5).abs() < 0.15, "{share} kept");
            let (wanted, terms) = model.expected(&w, &kept);
            let bound = |j: usize| 8.0 * rules.unit() * terms[j] + 8.0 * rules.smallest();
            near(&of_scores(&model, loss), &wanted, bound, "the gradient");
        }
    });
}

/// Numbers that are dropped by place, and a token that is put in where a mask says so.
#[derive(Module, Debug)]
struct Tokens {
    numbers: Param<Tensor<3>>,
    token: Param<Tensor<3>>,
}

#[test]
fn a_mask_that_is_broadcast_and_an_operand_that_is_have_their_gradients() {
    const SHAPE: [usize; 3] = [4, 6, 5];
    let [rows, places, width] = SHAPE;
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let w = numbers(3, rows * places * width);
        for rules in Mixed::on(target) {
            let model = Tokens {
                numbers: Param::from_tensor(tensor(1, SHAPE, &device)),
                token: Param::from_tensor(tensor(2, [1, 1, width], &device)),
            };
            let given = of(&w, SHAPE, &device);
            let loss = |model: &Tokens, w: Tensor<3>| {
                let half = Distribution::Bernoulli(0.5);
                let mask = Tensor::<3>::random([rows, places, 1], half, &w.device());
                let y = model.numbers.val() * mask.clone() + model.token.val() * mask.clone();
                (mask, (y * w).sum())
            };
            let recording = record(&model, &given, loss).unwrap();
            let (mask, loss) = recording.execute(&model, &given, &rules).unwrap();
            let mask = values(mask);
            let (mut of_numbers, mut of_token) = (Vec::new(), vec![0.0; width]);
            for (w, mask) in w.chunks(width).zip(&mask) {
                for (j, w) in w.iter().enumerate() {
                    let gradient = f64::from(w * mask);
                    of_numbers.push(gradient);
                    of_token[j] += gradient;
                }
            }
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let found = gradients(&model, grads);
            near(&found[0].2, &of_numbers, |_| 1e-7, "of the numbers");
            near(&found[1].2, &of_token, |_| 1e-5, "of the token");
        }
    });
}

#[test]
fn probabilities_are_half_where_products_alone_read_them() {
    let device = Device::flex().autodiff();
    let model = Attention::new(
        &numbers(1, 4 * CLASSES),
        &[1.0; CLASSES * 3],
        1,
        0.5,
        &device,
    );
    let w = tensor::<2>(3, [4, 3], &device);
    let softmax_of = |forward: fn(&Attention, Tensor<2>) -> Vec<Tensor<2>>| {
        let recording = record(&model, &w, forward).unwrap();
        let graph = recording.graph();
        let rules = Mixed {
            half: FloatDType::F16,
            arithmetic: Arithmetic::Native,
        };
        let assigned = graph.nodes().zip(graph.assign(&rules));
        // Its last part: the exponentials over their sum.
        let mut softmax = assigned.filter(|(node, _)| node.name() == "div");
        softmax.next().unwrap().1.results.unwrap()
    };
    let half = FloatDType::F16.into();
    assert_eq!(
        softmax_of(|model, _| vec![softmax(model.scores.val(), 1).matmul(model.values.val())]),
        half
    );
    assert_eq!(
        softmax_of(|model, _| {
            let p = model.dropout.forward(softmax(model.scores.val(), 1));
            vec![p.matmul(model.values.val())]
        }),
        half
    );
    assert_ne!(
        softmax_of(|model, _| {
            let p = softmax(model.scores.val(), 1);
            vec![p.clone().matmul(model.values.val()), p.log()]
        }),
        half
    );
    // A rounded probability is zero where its logarithm is not infinite.
    assert_ne!(
        softmax_of(|model, _| {
            let p = model.dropout.forward(softmax(model.scores.val(), 1));
            vec![(p + 1e-9).log()]
        }),
        half
    );
}
