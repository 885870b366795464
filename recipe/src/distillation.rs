//! Learning from a larger model.

use burn::tensor::Tensor;
use burn::tensor::activation::{log_softmax, softmax};
use serde::{Deserialize, Serialize};

use crate::RecipeError;
use crate::check::Check;

/// The loss of a student that learns from a teacher, too.
///
/// ```text
/// loss = (1 − weight) · loss at the targets
///      + weight · T² · mean over examples of KL(softmax(z_teacher / T) ‖ softmax(z_student / T))
///      + features · mean over pairs of features of mean squared error
/// ```
///
/// T² keeps the gradients of the second term as large as those of the first while T changes.
/// [Distilling the Knowledge in a Neural Network, Hinton, Vinyals & Dean,
/// 2015](https://arxiv.org/abs/1503.02531); features after [FitNets, Romero et al.,
/// 2015](https://arxiv.org/abs/1412.6550).
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_recipe::Distillation;
///
/// let device = Device::flex();
/// let student = Tensor::<2>::from_data([[0.0, 0.0]], &device);
/// let teacher = Tensor::<2>::from_data([[0.0, 2.0]], &device);
/// // T = 2: the teacher says 1/(1+e), e/(1+e), the student ½, ½.
/// let loss = Distillation::new(2.0, 1.0).logits(student, teacher).into_scalar::<f64>();
/// let p = 1.0 / (1.0 + 1f64.exp());
/// let kl = p * (2.0 * p).ln() + (1.0 - p) * (2.0 * (1.0 - p)).ln();
/// assert!((loss - 4.0 * kl).abs() < 1e-6);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Distillation {
    /// T, what logits are divided by; positive.
    pub temperature: f64,
    /// Share of the teacher in the loss, 0 to 1.
    pub weight: f64,
    /// Weight of the squared error of features, at least 0. Default: 0.
    #[serde(default)]
    pub features: f64,
}

impl Distillation {
    /// From logits, at this temperature, with this share of the loss.
    pub fn new(temperature: f64, weight: f64) -> Self {
        Self {
            temperature,
            weight,
            features: 0.0,
        }
    }

    /// From features, too, with this weight.
    pub fn with_features(mut self, weight: f64) -> Self {
        self.features = weight;
        self
    }

    /// T² · mean KL(teacher ‖ student) of logits `[examples, classes]`, or `[…, classes]` of sequences, in
    /// which each position is an example; `[1]`.
    ///
    /// Gradients go to both; a teacher without autodiff gets none.
    ///
    /// # Panics
    ///
    /// Where the two have not the same shape.
    pub fn logits<const D: usize>(&self, student: Tensor<D>, teacher: Tensor<D>) -> Tensor<1> {
        // Burn would repeat the only class of one for all of the other.
        assert_eq!(
            student.dims(),
            teacher.dims(),
            "logits of student and teacher"
        );
        let classes = D - 1;
        let examples: usize = student.dims()[..classes].iter().product();
        let t = self.temperature;
        let teacher = teacher.div_scalar(t);
        let log_p = log_softmax(teacher.clone(), classes);
        let p = softmax(teacher, classes);
        let log_q = log_softmax(student.div_scalar(t), classes);
        // p ln p is 0 at 0, where its logarithm is -inf and its product NaN.
        let impossible = p.clone().equal_elem(0.0);
        let log_ratio = (log_p - log_q).mask_fill(impossible, 0.0);
        let sum = (p * log_ratio).sum();
        sum.mul_scalar(t * t / examples.max(1) as f64)
    }

    /// The mean over the pairs of their mean squared error; `[1]`, `None` without a pair. Tensors of
    /// a pair have the same shape.
    pub fn feature_error(
        &self,
        student: Vec<Tensor<2>>,
        teacher: Vec<Tensor<2>>,
    ) -> Option<Tensor<1>> {
        let count = student.len().min(teacher.len()).max(1) as f64;
        let errors = student.into_iter().zip(teacher);
        let errors = errors.map(|(student, teacher)| (student - teacher).square().mean());
        let sum = errors.reduce(|sum, error| sum + error);
        sum.map(|sum| sum.div_scalar(count))
    }

    /// Refuses features that are no pairs.
    pub(crate) fn check_features(
        student: &[Tensor<2>],
        teacher: &[Tensor<2>],
    ) -> Result<(), RecipeError> {
        let shapes = |features: &[Tensor<2>]| -> Vec<[usize; 2]> {
            features.iter().map(|feature| feature.dims()).collect()
        };
        let (student, teacher) = (shapes(student), shapes(teacher));
        match student == teacher {
            true => Ok(()),
            false => Err(RecipeError::task(format!(
                "`distillation.features`: those of the student are {student:?}, those of the teacher \
                 {teacher:?}; return the same ones of both, or leave them out"
            ))),
        }
    }

    /// Refuses logits that say nothing: the softmax of one class is 1.
    pub(crate) fn check_logits(logits: &Tensor<2>) -> Result<(), RecipeError> {
        match logits.dims() {
            [_, 0 | 1] => Err(RecipeError::task(
                "`Task::with_logits` gives one class, of which a distillation learns nothing: of a \
                 binary classifier with one output z give the two `[0, z]`",
            )),
            _ => Ok(()),
        }
    }

    /// The loss of a student in a training loop of one's own, from its loss at the targets `[1]` and the
    /// logits of both, `[…, classes]`, without features; `[1]`.
    ///
    /// The teacher's logits come from a copy of the dense model without autodiff, made before it is
    /// pruned (`model.valid()`), on the student's device:
    ///
    /// ```
    /// use burn::module::Module;
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_lean_recipe::Distillation;
    ///
    /// let device = Device::flex().autodiff();
    /// let model = LinearConfig::new(2, 3).init(&device);
    /// let teacher = model.valid();
    /// let x = Tensor::<2>::from_data([[1.0, 2.0]], &device);
    /// let taught = Tensor::from_inner(teacher.forward(x.clone().inner()));
    /// let logits = model.forward(x);
    /// let at_targets = logits.clone().square().mean(); // for example
    /// let loss = Distillation::new(2.0, 0.9).loss(at_targets.clone(), logits, taught);
    /// // It says what its teacher says: a tenth of its own loss is left.
    /// let [loss, at_targets] = [loss, at_targets].map(|loss| loss.into_scalar::<f32>());
    /// assert!((loss - 0.1 * at_targets).abs() < 1e-5);
    /// ```
    pub fn loss<const D: usize>(
        &self,
        at_targets: Tensor<1>,
        student: Tensor<D>,
        teacher: Tensor<D>,
    ) -> Tensor<1> {
        at_targets.mul_scalar(1.0 - self.weight)
            + self.logits(student, teacher).mul_scalar(self.weight)
    }

    /// The whole loss, from that at the targets.
    pub(crate) fn blend(
        &self,
        targets: Tensor<1>,
        logits: (Tensor<2>, Tensor<2>),
        features: (Vec<Tensor<2>>, Vec<Tensor<2>>),
    ) -> Tensor<1> {
        let mut loss = self.loss(targets, logits.0, logits.1);
        if let Some(error) = self.feature_error(features.0, features.1) {
            loss = loss + error.mul_scalar(self.features);
        }
        loss
    }

    pub(crate) fn validate(&self, stage: &str) -> Result<(), RecipeError> {
        let stage = format!("{stage}.distillation");
        let check = Check(&stage);
        let t = self.temperature;
        check.accept(
            t.is_finite() && t > 0.0,
            "temperature",
            t,
            "positive and finite",
        )?;
        check.accept(
            (0.0..=1.0).contains(&self.weight),
            "weight",
            self.weight,
            "0 to 1",
        )?;
        let features = self.features;
        check.accept(
            features.is_finite() && features >= 0.0,
            "features",
            features,
            "at least 0",
        )
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn features_of_other_shapes_or_numbers_are_refused() {
        let of = |width: usize| Tensor::<2>::zeros([3, width], &Device::flex());
        let check = |student: &[Tensor<2>], teacher: &[Tensor<2>]| {
            Distillation::check_features(student, teacher).map_err(|error| error.to_string())
        };
        assert_eq!(check(&[of(4), of(5)], &[of(4), of(5)]), Ok(()));
        let error = check(&[of(4)], &[of(5)]).unwrap_err();
        assert!(error.contains("student are [[3, 4]]"), "{error}");
        assert!(error.contains("teacher [[3, 5]]"), "{error}");
        assert!(check(&[of(4)], &[of(4), of(5)]).is_err());
    }
}
