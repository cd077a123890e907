"""XRLinearClassifier works with the tools of scikit-learn."""

import numpy as np
import pytest
import scipy.sparse as sp

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer
from sklearn.utils.estimator_checks import parametrize_with_checks

from xsoftmax.sklearn import XRLinearClassifier


def problem(classes=30, rows=400):
    random = np.random.default_rng(0)
    centres = random.random((classes, 50)) * (random.random((classes, 50)) < 0.2) + 1e-3
    y = random.integers(classes, size=rows)
    return centres[y] + 0.02 * random.random((rows, 50)), y


@parametrize_with_checks([XRLinearClassifier()])
def test_it_passes_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


def test_multiclass_targets_are_learned():
    X, y = problem()
    names = np.array([f"class {i}" for i in range(30)])[y]
    model = make_pipeline(Normalizer(),
                          XRLinearClassifier(arity=4, max_leaf_size=5)).fit(X[:300], names[:300])
    assert model.score(X[300:], names[300:]) > 0.9 and model.predict(sp.csr_matrix(
        X[300:]))[0].startswith("class ")


def test_multilabel_targets_are_learned():
    X, y = problem()
    X = X[:200] + X[200:]
    Y = np.zeros((200, 30), int)
    Y[np.arange(200), y[:200]] = Y[np.arange(200), y[200:]] = 1
    for form in (Y, sp.csr_matrix(Y)):
        model = make_pipeline(Normalizer(), XRLinearClassifier(arity=4,
                                                               max_leaf_size=5)).fit(X, form)
        found = model.predict(X)
        assert sp.issparse(found) == sp.issparse(form) and found.shape == (200, 30)
        assert ((found.toarray() if sp.issparse(found) else found) == Y).mean() > 0.97
    scores = model[-1].predict_scores(Normalizer().transform(X))
    assert ((scores >= 0.5).astype(int) != found).nnz == 0


@pytest.mark.parametrize("loss", ["squared_hinge", "logistic"])
@pytest.mark.parametrize("classes", [2, 30])
def test_multiclass_probabilities_are_normalized_scores(loss, classes):
    X, y = problem(classes)
    model = XRLinearClassifier(arity=4, max_leaf_size=5, loss=loss, beam=30,
                               threshold=0.01).fit(X[:300], y[:300])
    proba, decision = model.predict_proba(X[300:]), model.decision_function(X[300:])
    np.testing.assert_allclose(proba.sum(1), 1)
    want = model.model_.predict(sp.csr_matrix(X[300:], dtype=np.float32), classes,
                                classes).toarray()
    np.testing.assert_allclose(proba, want / want.sum(1, keepdims=True), atol=1e-5)
    if classes == 2:
        assert decision.shape == (100,) and np.array_equal(model.predict(X[300:]),
                                                           (decision > 0).astype(int))
    else:
        assert decision.shape == (100, 30) and np.array_equal(model.predict(X[300:]),
                                                              decision.argmax(1))
    assert np.array_equal(model.predict(X[300:]), model.classes_[proba.argmax(1)])


def test_multilabel_probabilities_are_scores():
    X, y = problem()
    Y = np.eye(30, dtype=int)[y]
    model = XRLinearClassifier(arity=4, max_leaf_size=5, topk=30, beam=30).fit(X, Y)
    np.testing.assert_allclose(model.predict_proba(X), model.predict_scores(X).toarray(), atol=1e-6)
    np.testing.assert_allclose(np.exp(model.decision_function(X)), model.predict_proba(X),
                               atol=1e-12)
    assert np.array_equal(model.predict(X), (model.predict_proba(X) >= 0.5).astype(int))


def test_grid_search_and_clone_work_and_wrong_use_is_refused():
    X, y = problem()
    search = GridSearchCV(XRLinearClassifier(arity=4, max_leaf_size=5),
                          {"positive_cost": [0.5, 2.0]}, cv=2).fit(X, y)
    assert set(search.best_params_) == {"positive_cost"}
    assert clone(XRLinearClassifier(topk=3)).topk == 3
    with pytest.raises(NotFittedError):
        XRLinearClassifier().predict(X)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        XRLinearClassifier().fit(X, y[:300])


@pytest.mark.parametrize("random_state", [None, 3, np.random.RandomState(0)])
def test_any_random_state_of_scikit_learn_works(random_state):
    model = XRLinearClassifier(random_state=random_state,
                               max_leaf_size=4).fit(np.eye(6, dtype=np.float32), np.arange(6))
    assert model.predict(np.eye(6, dtype=np.float32)).shape == (6,)


def test_column_vectors_give_a_warning_and_counts_are_refused():
    with pytest.warns(UserWarning, match="column-vector"):
        model = XRLinearClassifier(max_leaf_size=4).fit(np.eye(6, dtype=np.float32),
                                                        np.arange(6)[:, None])
    assert model.classes_.tolist() == list(range(6))
    with pytest.raises(ValueError, match="zeros and ones, got 5"):
        XRLinearClassifier().fit(np.eye(2, dtype=np.float32), np.array([[0, 5], [1, 0]]))
