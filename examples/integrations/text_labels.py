"""Labels texts with a tree of linear classifiers in a scikit-learn
pipeline."""

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MultiLabelBinarizer
from xsoftmax.sklearn import XRLinearClassifier

subjects = {
    "birds": "wing feather nest", "ships": "harbour mast sail",
    "stars": "orbit telescope light", "bread": "oven flour crust"
}
random = np.random.default_rng(0)
labels = [
    sorted(random.choice(list(subjects), size=count, replace=False))
    for count in random.integers(1, 3, 200)
]
texts = [
    " ".join(
        random.permutation(" ".join(subjects[name]
                                    for name in names).split()))
    for names in labels
]
binarizer = MultiLabelBinarizer(sparse_output=True)
model = make_pipeline(TfidfVectorizer(), XRLinearClassifier())
model.fit(texts, binarizer.fit_transform(labels))
suggested = binarizer.inverse_transform(
    model.predict(["sail and mast below the light of a "
                   "telescope"]))
