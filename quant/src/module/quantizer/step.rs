//! What a quantizer does, and says, when a training step is over.

use super::FakeQuantize;
use crate::Learned;
use crate::module::control::{Counted, Mode};
use crate::module::resident::Resident;

const PASSED_BY: &str = "no value came by these quantizers in the first step: run the model with \
     `QuantizedForward::run`, or in mixed precision with `Autocast::run`, call these layers with `forward_q` in a \
     forward pass of your own, or leave them out with an override";

const KEPT_NOTHING: &str = "these quantizers kept nothing of what they observed in this step: on several devices \
     replicas of the model are called, and what they observe, and where they begin to learn, stays with them. \
     Calibrate the model before, or after (`calibrate_unobserved`), or give it what a replica observed \
     (`merge_observers`)";

impl FakeQuantize {
    /// Moves on by one step, unless somebody has counted it.
    pub(crate) fn advanced(self) -> Self {
        // The range stays, and what was computed from it.
        self.lock().control.advance();
        Self {
            resident: Resident::default(),
            ..self
        }
    }

    /// Moves on by one step, which [`advance`](crate::advance) then does not do again.
    pub(crate) fn advance_by_run(&self) {
        let mut state = self.lock();
        state.control.count_step();
        state.control.counted = Counted::ByRun;
    }

    /// Whether a value came by since a step was last taken.
    pub(crate) fn has_acted(&self) -> bool {
        self.lock().control.has_acted()
    }

    /// Moves on by one step, which the optimizer has taken, if a value came by a quantizer of the model.
    pub(crate) fn step_taken(&self, has_acted: bool) -> Option<&'static str> {
        let warning = self.step_warning(has_acted);
        if has_acted {
            self.lock().control.step_taken();
        }
        warning
    }

    /// Whether somebody has counted the step that is over, and said what there was to say of it.
    pub(crate) fn is_counted(&self) -> bool {
        self.lock().control.counted != Counted::No
    }

    /// What there is to say of activations in the step that is over, which is not counted yet; where no value came
    /// by any quantizer of the model, it may be over for the second time.
    pub(crate) fn step_warning(&self, has_acted: bool) -> Option<&'static str> {
        if self.is_of_weight() {
            return None;
        }
        let mut state = self.lock();
        let control = &mut state.control;
        let is_first = control.step == 0;
        let begins = is_first || control.step == control.schedule.quantize_from;
        if !begins || control.mode == Mode::Off || control.was_counted_by_run() {
            return None;
        }
        if !control.was_called() {
            let is_new = is_first && !std::mem::replace(&mut control.is_warned, true);
            return is_new.then_some(PASSED_BY);
        }
        drop(state);
        (has_acted && self.lacks_range()).then_some(KEPT_NOTHING)
    }

    /// Whether it lacks what a forward pass of this very model would have left in it in the step that is not
    /// counted yet: the scale that it learns, or a range.
    fn lacks_range(&self) -> bool {
        match self.config.learned != Learned::None && self.phase().quantizes() {
            true => !self.is_learning(),
            false => self.config.observer.has_memory() && !self.has_range(),
        }
    }

    /// Whether it is to learn a scale that no forward pass of this very model has begun in the step that is over.
    pub(crate) fn waits_to_learn(&self) -> bool {
        let state = self.lock();
        let control = &state.control;
        state.learned_scale.is_some()
            && self.training.is_enabled()
            && control.phase_at(control.last_step()).quantizes()
            && !(control.initialized || control.was_counted_by_run())
    }
}
