//! Averages of the weights of several models.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::path::Path;

use burn::module::{Module, Param};
use burn::store::ModuleRecord;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use burn_lean_quant::{load_record, module::map_quantizers, qat::merge_observers};
use burn_lean_reparam::{
    PathMapper, PathVisitor, Trail, Training, map_with_path, own_copy, visit_with_path,
};

use crate::RecipeError;

/// The average of models of one kind, weight by weight.
///
/// [Model soups, Wortsman et al., 2022](https://arxiv.org/abs/2203.05482): models that were
/// fine-tuned from the same weights, with other learning rates or seeds, lie in one valley, and their
/// average is often better than the best of them, at the cost of one. Models that were trained from
/// other initial weights do not average.
///
/// Every float tensor is averaged, in F64. Running statistics of BatchNorm are averaged, too, which
/// are not those of the averaged weights: measure them anew with
/// [`recompute_batch_norm`](burn_lean_prune::recompute_batch_norm). Integer and boolean tensors
/// (counters, the masks of pruned models) have no average: they must be equal. The parts of a
/// reparameterization are tensors like others, but for observed ranges of quantizers, which
/// [`merge_observers`](burn_lean_quant::qat::merge_observers) joins; fold them in first
/// ([`Module::materialize`]) where their average means nothing, as of the two factors of an adapter.
/// What says how far a training is has no average either, and stays that of the first model: the loss scale of
/// an `Amp` with its counters, and the steps of quantizers.
///
/// ```
/// use burn::module::Param;
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_lean_recipe::uniform_soup;
///
/// let device = Device::flex();
/// let model = |value: f32| {
///     let mut linear = LinearConfig::new(2, 1).with_bias(false).init(&device);
///     linear.weight = Param::from_data([[value], [-value]], &device);
///     linear
/// };
/// let soup = uniform_soup(&[model(1.0), model(2.0), model(6.0)])?;
/// let weight = soup.weight.val().into_data();
/// assert_eq!(weight.iter::<f32>().collect::<Vec<_>>(), [3.0, -3.0]);
/// # Ok::<(), burn_lean_recipe::RecipeError>(())
/// ```
///
/// # Errors
///
/// [`RecipeError::Soup`]: no model; a tensor that is missing in one, has another shape or dtype, or
/// an integer tensor with other values, with its path; quantized weights.
pub fn uniform_soup<M: Module>(models: &[M]) -> Result<M, RecipeError> {
    let Some((first, others)) = models.split_first() else {
        return Err(RecipeError::Soup {
            path: "the models".into(),
            reason: "there is none".into(),
        });
    };
    let tensors = Tensors::of(first)?;
    let others: Vec<Tensors> = others.iter().map(Tensors::of).collect::<Result<_, _>>()?;
    let mut averages = HashMap::new();
    for (index, other) in others.iter().enumerate() {
        tensors.check(other, index + 1)?;
    }
    for (path, data) in tensors.found {
        if !data.dtype().is_float() || tensors.progress.contains(&path) {
            continue;
        }
        let mut sums: Vec<f64> = data.iter::<f64>().collect();
        for other in &others {
            for (sum, value) in sums.iter_mut().zip(other.get(&path).iter::<f64>()) {
                *sum += value;
            }
        }
        let count = models.len() as f64;
        let averaged: Vec<f64> = sums.iter().map(|sum| sum / count).collect();
        let shape = data.shape().clone();
        averages.insert(
            path,
            TensorData::new(averaged, shape).convert_dtype(data.dtype()),
        );
    }
    // A copy, of running statistics, too: Burn maps those in place.
    let soup = map_with_path(first.valid(), &mut Replace(averages));
    // Ranges are no weights.
    let soup = merge_observers(soup, models).map_err(|rejected| RecipeError::Soup {
        path: "the quantizers".into(),
        reason: rejected.into_error().to_string(),
    })?;
    Ok(Training::of(first).restore(soup))
}

/// The [average](uniform_soup) of models that were saved as Burn's records
/// ([`ModuleRecord`]), each loaded into a copy of `model`: the checkpoints of a training, say, also those of
/// Burn's Learner, where `model` is the `Amp` or `AfterStep` that it trained. All of them are in memory at once.
///
/// # Errors
///
/// Those of [`uniform_soup`]; [`RecipeError::Soup`] with the path of a file that cannot be read, or is no
/// record of such a model.
pub fn uniform_soup_of_records<M: Module>(
    model: &M,
    paths: &[impl AsRef<Path>],
) -> Result<M, RecipeError> {
    let load = |path: &Path| -> Result<M, RecipeError> {
        let refused = |error: &dyn Display| RecipeError::Soup {
            path: path.display().to_string(),
            reason: error.to_string(),
        };
        let record = ModuleRecord::load(path).map_err(|error| refused(&error))?;
        let loaded = load_record(own_copy(model), record);
        loaded.map_err(|rejected| refused(rejected.error()))
    };
    let models = paths.iter().map(|path| load(path.as_ref()));
    uniform_soup(&models.collect::<Result<Vec<M>, _>>()?)
}

/// What [`greedy_soup`] made.
#[derive(Debug, Clone)]
pub struct GreedySoup<M> {
    /// The average of the models that were taken.
    pub model: M,
    /// What it is worth.
    pub score: f64,
    /// The models that were taken, by their places in the list, the best first.
    pub taken: Vec<usize>,
    /// What each model of the list is worth alone.
    pub scores: Vec<f64>,
}

/// The average of those models that do not make it worse.
///
/// ```text
/// order the models by score, the best first
/// for each: if the average with it scores at least as high as the one without: take it
/// ```
///
/// Recipe 1 of [Model soups, Wortsman et al., 2022](https://arxiv.org/abs/2203.05482). `score` is
/// what a model is worth on examples that are held out of training *and* of the final test, larger
/// for a better one; never less than the score of the best model comes out.
///
/// # Errors
///
/// Those of [`uniform_soup`] and of `score`; [`RecipeError::Soup`] where a score is NaN.
pub fn greedy_soup<M: Module>(
    models: &[M],
    mut score: impl FnMut(&M) -> Result<f64, RecipeError>,
) -> Result<GreedySoup<M>, RecipeError> {
    // That they fit together is known before anything is evaluated.
    uniform_soup(models)?;
    let mut scores = Vec::new();
    for (index, model) in models.iter().enumerate() {
        scores.push(number(score(model)?, || format!("model {index}"))?);
    }
    let mut order: Vec<usize> = (0..models.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    let mut taken = vec![order[0]];
    // A copy, of running statistics, too.
    let mut best = (own_copy(&models[order[0]]), scores[order[0]]);
    for candidate in &order[1..] {
        let with: Vec<M> = taken
            .iter()
            .chain([candidate])
            .map(|at| models[*at].clone())
            .collect();
        let soup = uniform_soup(&with)?;
        let places = || format!("the average of models {taken:?} and {candidate}");
        let found = number(score(&soup)?, places)?;
        if found >= best.1 {
            best = (soup, found);
            taken.push(*candidate);
        }
    }
    Ok(GreedySoup {
        model: best.0,
        score: best.1,
        taken,
        scores,
    })
}

/// A score that orders; `of` says whose it is.
fn number(score: f64, of: impl FnOnce() -> String) -> Result<f64, RecipeError> {
    match score.is_nan() {
        false => Ok(score),
        true => Err(RecipeError::Soup {
            path: of(),
            reason: "its score is no number".into(),
        }),
    }
}

/// The tensors of a model by their paths, in module order.
#[derive(Default)]
struct Tensors {
    found: Vec<(String, TensorData)>,
    /// Paths of those that say how far a training is.
    progress: HashSet<String>,
    failed: Option<RecipeError>,
}

impl Tensors {
    fn of<M: Module>(model: &M) -> Result<Self, RecipeError> {
        let mut tensors = Self::default();
        // In step 0: schedules are compared, and not how far they are.
        let model = map_quantizers(model.valid(), |located| {
            let schedule = located.quantizer.schedule();
            located.quantizer.with_schedule(schedule)
        });
        visit_with_path(&model, &mut tensors);
        match tensors.failed.take() {
            None => Ok(tensors),
            Some(error) => Err(error),
        }
    }

    fn get(&self, path: &str) -> &TensorData {
        let found = self.found.iter().find(|(found, _)| found == path);
        &found.expect("the tensors have been compared").1
    }

    fn push(&mut self, at: &Trail, data: Result<TensorData, impl std::fmt::Display>) {
        let path = at.path();
        if is_of_scaler(at) {
            self.progress.insert(path.clone());
        }
        match data {
            Ok(data) => self.found.push((path, data)),
            Err(error) => {
                let reason = error.to_string();
                self.failed
                    .get_or_insert(RecipeError::Soup { path, reason });
            }
        }
    }

    /// Refuses a model that does not fit; `number` is its place in the list.
    fn check(&self, other: &Self, number: usize) -> Result<(), RecipeError> {
        let refuse = |path: &str, reason: String| {
            Err(RecipeError::Soup {
                path: path.into(),
                reason,
            })
        };
        let places: HashMap<&str, &TensorData> = other
            .found
            .iter()
            .map(|(path, data)| (path.as_str(), data))
            .collect();
        for (path, data) in &self.found {
            let Some(twin) = places.get(path.as_str()) else {
                return refuse(path, format!("model {number} does not have it"));
            };
            if (twin.shape(), twin.dtype()) != (data.shape(), data.dtype()) {
                return refuse(
                    path,
                    format!(
                        "it is {:?} of {:?} in model 0, but {:?} of {:?} in model {number}",
                        data.dtype(),
                        data.shape(),
                        twin.dtype(),
                        twin.shape()
                    ),
                );
            }
            let differs = || data.as_bytes() != twin.as_bytes();
            if !data.dtype().is_float() && !self.progress.contains(path) && differs() {
                let advice = match path.rsplit('.').next() {
                    // What a quantizer was told, and what it has.
                    Some("control") => {
                        "the quantizers differ in their schedules, for which there is `set_schedule`, in their \
                         schemes, or in what has begun: ranges, learned scales"
                    }
                    // Of a mask.
                    Some("kept") => {
                        "fold masks in with `materialize`; records are loaded into models for that"
                    }
                    _ => "give it one value in all models",
                };
                return refuse(
                    path,
                    format!(
                        "{:?} tensors have no average, and model {number} has other values ({advice})",
                        data.dtype()
                    ),
                );
            }
        }
        let known = |path: &String| self.found.iter().any(|(found, _)| found == path);
        match other.found.iter().find(|(path, _)| !known(path)) {
            Some((path, _)) => refuse(path, format!("only model {number} has it")),
            None => Ok(()),
        }
    }
}

/// Whether a tensor belongs to the grad scaler of an `Amp`: its scale and the inverse of that, whose averages
/// are no inverse of each other, and counters.
fn is_of_scaler(at: &Trail) -> bool {
    let is_part = at.names().iter().any(|name| name == "grad_scaler");
    is_part && at.container() == "Struct:StateTensors"
}

impl PathVisitor for Tensors {
    fn float<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D>>) {
        let base = param.base();
        match base.dtype() {
            DType::QFloat(_) => {
                let reason = "it is quantized: average the models before they are converted";
                self.push(at, Err::<TensorData, _>(reason));
            }
            _ => self.push(at, base.try_into_data()),
        }
    }

    fn int<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Int>>) {
        self.push(at, param.val().try_into_data());
    }

    fn bool<const D: usize>(&mut self, at: &Trail, param: &Param<Tensor<D, Bool>>) {
        self.push(at, param.val().try_into_data());
    }
}

/// Tensors that take the place of others, by path.
struct Replace(HashMap<String, TensorData>);

impl PathMapper for Replace {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.0.remove(&at.path()) {
            Some(data) => {
                param.map(|tensor| Tensor::from_data(data, (&tensor.device(), tensor.dtype())))
            }
            None => param,
        }
    }
}
