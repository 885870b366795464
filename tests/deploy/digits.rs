//! A network that has learned, quantized: the same classes of all test digits as the fake-quantized
//! model, from a file and in integers.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};
use burn_lean::deploy::{Arithmetic, Backend, EngineConfig, Execution, Export, Form};
use burn_lean::quant::{PtqConfig, QuantizedForward, fold_for};

use crate::image_set::{Batch, ImageSet, Images};
use crate::judge::{for_the_judge, output_step};
use crate::support::{each_device, farthest, scratch, values, with_numbers};

/// Convolutions with batch normalization, and nothing that knows of quantization.
#[derive(Module, Debug)]
struct Net {
    first: Conv2d,
    first_norm: BatchNorm,
    second: Conv2d,
    second_norm: BatchNorm,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let conv = |from, to, stride| {
            Conv2dConfig::new([from, to], [3, 3])
                .with_stride([stride; 2])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(device)
        };
        let net = Self {
            first: conv(1, 8, 1),
            first_norm: BatchNormConfig::new(8).init(device),
            second: conv(8, 16, 2),
            second_norm: BatchNormConfig::new(16).init(device),
            head: LinearConfig::new(16 * 4 * 4, 10).init(device),
        };
        with_numbers(net, 1)
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.first_norm.forward(self.first.forward(x)));
        let x = relu(self.second_norm.forward(self.second.forward(x)));
        self.head.forward(x.flatten(1, 3))
    }
}

fn trained(images: &Images, epochs: u64) -> Net {
    let device = Device::flex().autodiff();
    let mut net = Net::new(&device);
    let mut optimizer = AdamWConfig::new().init();
    let loss = CrossEntropyLossConfig::new().init(&device);
    for epoch in 0..epochs {
        for Batch { images, labels } in images.shuffled(epoch, 32, &device) {
            let loss = loss.forward(net.forward(images), labels);
            let gradients = GradientsParams::from_grads(loss.backward(), &net);
            net = optimizer.step(3e-3, net, gradients);
        }
    }
    net
}

/// Codes of 8 bits on both sides, with ranges from 256 training images.
fn quantized(net: Net, images: &Images) -> Net {
    let device = Device::flex();
    let some = images.take(256);
    let batches = || some.ordered(64, &device);
    let one = batches().next().expect("there are images").images;
    let folded = fold_for(net, one, Net::forward).unwrap();
    let config = PtqConfig::new().with_progress(false);
    let batches = || batches().map(|batch| batch.images);
    let (net, _) = config.quantize_for(folded, batches, Net::forward).unwrap();
    net.valid()
}

/// Logits `[images, 10]` on the host, with what they say.
struct Logits(Vec<f32>);

impl Logits {
    fn classes(&self) -> Vec<usize> {
        let best = |row: &[f32]| (0..10).max_by(|a, b| row[*a].total_cmp(&row[*b]));
        self.0.chunks(10).filter_map(best).collect()
    }

    /// The same classes, and within one step.
    fn judge(&self, found: &Self, who: &str) {
        assert_eq!(found.classes(), self.classes(), "{who}");
        let off = farthest(&found.0, &self.0);
        let step = output_step(&self.0);
        println!("{who}: {off:.2e} of {step:.2e}");
        assert!(off <= step, "{who}: {off} is more than a step of {step}");
    }
}

#[test]
fn all_test_digits_have_the_class_of_the_fake_quantized_model() {
    let digits = ImageSet::digits();
    let net = quantized(trained(&digits.train, 5), &digits.train);
    each_device(|target| {
        let net = net.clone().to_device(&target.device);
        let all = digits.test.ordered(digits.test.len(), &target.device);
        let x = all.map(|batch| batch.images).next().unwrap();
        let fake = QuantizedForward::new().run(&net, x.clone(), Net::forward);
        let logits = fake.unwrap();
        let fake = Logits(values(logits.clone()));
        let right = fake.classes().into_iter().zip(digits.test.labels());
        let right = right.filter(|(class, label)| *class as i64 == **label);
        assert!(right.count() > 330, "it has learned");

        let some = x.clone().slice([0..8]);
        let record = || Export::record(&net, &some, |net: &Net, x| net.forward(x)).unwrap();
        let (_folder, path) = scratch("digits.onnx");
        let written = record().to_onnx(Form::Qdq).unwrap();
        assert_eq!(written.layers.len(), 3);
        assert!(
            written
                .layers
                .iter()
                .all(|layer| layer.execution == Execution::Qdq)
        );
        for_the_judge(&written, &x, &logits, Some(output_step(&fake.0)));
        written.model.save(&path).unwrap();
        let file = EngineConfig::new().open(&path).unwrap();
        let found = file.run(vec![x.clone().into_data()]).unwrap().remove(0);
        fake.judge(&Logits(found.iter().collect()), "file in rten");

        let integer = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
        let config = integer.with_backend(Some(Backend::Own));
        let engine = config.compile(record()).unwrap();
        let report = engine.report();
        assert_eq!(report.layers.len(), 3, "{report}");
        let mut layers = report.layers.iter();
        let all = layers.all(|layer| layer.execution == Execution::Integer);
        assert!(all, "{report}");
        fake.judge(&Logits(values(engine.run(&x).unwrap())), "integers");
    });
}
